"""What the user asked for (`EngineConfig`) and what this machine will do (`EnginePlan`): two frozen objects."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from pagedcore.config_checks import check_config, is_number, require
from pagedcore.errors import ConfigError, UnknownOptionError
from pagedcore.shown import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Every field has a default; a bad value raises `ConfigError` naming value and limit."""

    model: str | None = None
    """Local folder, or name in the Hugging Face cache or hub; None is the embedded SmolLM2-135M-Instruct."""
    tokenizer: str | None = None
    """Folder or name of another tokenizer; None is the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    """No remote code is ever run: True is taken with a warning, and a model that needs code of its own is refused by its architecture's
    name."""
    served_model_name: str | tuple[str, ...] | None = None
    """Name or names that clients may use; None is the model's name."""
    dtype: str = "auto"
    """Arithmetic of weights and activations: float16 (half), bfloat16, float32 (float); auto is the checkpoint's, and float32 on a CPU."""
    quantization: str | None = None
    """None reads it from the checkpoint; a name must agree with it: gptq (or gptq_marlin), awq (or awq_marlin), compressed-tensors."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy: random weights from config.json alone, for benchmarks."""
    device: str = "auto"
    """auto (CUDA if there is one), cpu, cuda or cuda:N."""
    seed: int = 0
    """Seeds the draw of the seeds of unseeded requests, and dummy weights."""
    max_model_len: int | Literal["auto"] = "auto"
    """Most tokens, prompt and output, of one request; auto is the model's own limit, or less if the pool is smaller."""
    block_size: int = 16
    """Tokens of one KV block: 8, 16, 32, 64, 128 or 256. Results do not depend on it."""
    num_kv_blocks: int | None = None
    """Exactly this many KV blocks; None sizes the pool from the memory."""
    kv_cache_dtype: str = "auto"
    """Dtype of the KV pool: auto is the model's; fp8 (or fp8_e4m3) holds twice the tokens of 16 bits in the same memory, rounds keys
    and values to 3 bits of mantissa, with no scale, and takes those beyond 448 as 448."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's total memory that this engine may use, in (0, 1]. On a CPU the pool is min(2 GiB, 10 % of free memory)."""
    swap_space: float = 0.0
    """GiB of host memory that keep KV blocks which the pool evicts: a prefix is copied back instead of computed again. 0 is none. Worth
    setting when the advice wants a larger pool than the device holds; not used where computing a block is measured as quicker."""
    enforce_eager: bool = False
    """Never use CUDA graphs."""
    enable_prefix_caching: bool = True
    """Share full prompt blocks between requests by their content."""
    tensor_parallel_size: int = 1
    """Number of GPUs that share each layer: 1, since this version has no tensor parallelism."""
    max_num_seqs: int = 256
    """Most requests that run at once; others wait, none is dropped."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step; None is max(2048, max_num_seqs) on a CPU and max(8192, max_num_seqs) on a GPU."""
    max_waiting_requests: int | None = None
    """Most requests that wait in the queue; more raise QueueFullError (HTTP 429). None is no limit."""
    max_running_per_tenant: int | None = None
    """Most requests of one tenant that run at once; its others wait for tenant_quota, and those of other tenants pass them. Requests
    that name no tenant are one tenant. None is no limit."""
    max_waiting_per_tenant: int | None = None
    """Most requests of one tenant that wait in the queue; more raise TenantQuotaError (HTTP 429), and other tenants' are still taken.
    None is no limit."""
    cache_fraction_per_tenant: float | None = None
    """Share of the KV blocks, in (0, 1], that one tenant may hold and cache at the expense of others. Beyond it, its own cached blocks make
    room, and where it has none its requests wait; a request that alone needs more is refused. None: the oldest block of all makes room."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue: first come first served, or by `priority` (lower first) and then arrival."""
    max_batch_wait_ms: float = 0.0
    """An idle engine waits at most this long to start a fuller batch; 0 never waits."""
    overlap: bool | Literal["auto"] = "auto"
    """Plan the next step while the device runs this one; auto is on for CUDA."""
    watermark_fraction: float = 0.01
    """Share of the KV pool kept free when a request is admitted, so that running ones can grow."""
    max_preemptions: int = 4
    """Preemptions after which a request is readmitted only with room for its whole length, and then keeps it."""
    isolation: Literal["thread", "process"] = "thread"
    """Where the engine loop runs: a thread of this process, or a child process, which is started again when it dies (Unix)."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids and texts stay empty."""
    chat_template: str | None = None
    """Jinja text or file that replaces the model's chat template."""
    download_dir: str | None = None
    """Folder for downloaded hub models; None is the Hugging Face cache."""
    metrics_instance: str = "0"
    """Value of the `engine` label on every metric: a name of this engine among others."""
    metrics_compat: Literal["vllm"] | None = None
    """vllm: the same numbers also stand under vLLM's metric names, for dashboards and autoscalers that read those. None: ours alone."""
    request_log: str | None = None
    """Where a JSON line for each request that ended is appended: a file, or - for standard output. None writes none."""
    request_log_sample: float = 1.0
    """Share of requests that have a line, in [0, 1], chosen by their id. Failed and slow ones always have."""
    slow_request_ms: float | None = None
    """A request that takes at least this long from arrival to end always has its line in request_log. None: none is slow."""
    otlp_endpoint: str | None = None
    """Collector that gets a span of each request over OTLP/HTTP, such as http://localhost:4318. None: spans go to the tracer provider
    that the process has set, if it has one."""

    def __post_init__(self) -> None:
        for name, value in _as_dict(self).items():
            object.__setattr__(self, name, _plain(value))
        check_config(self)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from keywords as people type them. Raises `UnknownOptionError` naming the nearest setting."""
        options = _translate_aliases(options)
        known = {f.name for f in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise UnknownOptionError(_unknown_option_message(name, known))
        return cls(**options)

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some settings changed, checked like a new one."""
        return EngineConfig.from_mapping({**_as_dict(self), **_translate_aliases(changes)})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the bytes of the device go, term by term. `kv_cache_bytes == num_blocks * block_bytes`."""

    device: str
    total_bytes: int
    held_by_others_bytes: int
    budget_bytes: int
    weights_bytes: int
    activations_bytes: int
    graphs_bytes: int
    block_bytes: int
    num_blocks: int

    @property
    def kv_cache_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierPlan:
    """What became of `swap_space`: blocks in host memory, if copying one is quicker than computing it, as measured at the start."""

    num_blocks: int
    """0 where computing is quicker: nothing is copied, and no memory is taken."""
    block_bytes: int
    copy_block_s: float
    """Seconds to host memory and back, one of many blocks that travel together."""
    compute_block_s: float
    """Seconds as part of a prompt."""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What this machine will do for a config: every value resolved, nothing left at auto."""

    config: EngineConfig
    model_dir: str
    tokenizer_dir: str
    model_name: str
    """The first served name; the `model_name` label on metrics."""
    served_model_names: tuple[str, ...]
    model_type: str
    device: str
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    """Storage of the weights, such as `gptq 4-bit group 64`; None is unquantized."""
    linear_backend: str
    """What multiplies with the weights: torch; for quantized ones triton-w4a16 or triton-w8a16 (packed, on a GPU), dequantized (a dense
    copy) or torch-int4 (for few rows, else dense). Joined by + where layers differ."""
    attention_backend: str
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    overlap: bool
    memory: MemoryPlan
    host_tier: HostTierPlan | None = None
    """None without `swap_space`."""
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return 0 if self.host_tier is None else self.host_tier.num_blocks


def _as_dict(config: EngineConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _translate_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """Other spellings: delay_factor (seconds) is max_batch_wait_ms."""
    options = dict(options)
    if "delay_factor" in options:
        if "max_batch_wait_ms" in options:
            raise ConfigError("delay_factor (seconds) and max_batch_wait_ms say the same thing; give one of them.")
        seconds = options.pop("delay_factor")
        require(is_number(seconds), f"delay_factor is {shown(seconds)} and must be a number of seconds; 0 never waits.")
        options["max_batch_wait_ms"] = float(seconds) * 1000.0
    return options


def _plain(value: object) -> object:
    """Paths as text, lists as tuples, numbers of other libraries (numpy) as Python's own; anything else as it is."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(value) if isinstance(value, list) else value


def _unknown_option_message(name: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(str(name)[:64], known, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else f" The settings are: {', '.join(sorted(known))}."
    return f"EngineConfig has no setting {shown(name)}.{hint}"
