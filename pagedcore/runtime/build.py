"""From a config and a model folder to a runner that is ready, and the plan that says what was decided."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedcore.config import EngineConfig, EnginePlan, HostTierPlan, MemoryPlan
from pagedcore.cpu_threads import num_cpu_threads
from pagedcore.errors import ConfigError
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.decoder import Decoder
from pagedcore.models.registry import load_model, read_architecture, read_quantization, resolve_dtype
from pagedcore.runtime.attention import select_attention_backend
from pagedcore.runtime.memory import (
    MeasuredMemory,
    PoolRequest,
    block_bytes,
    cpu_budget_bytes,
    cuda_budget_bytes,
    plan_memory,
    resolve_max_model_len,
)
from pagedcore.runtime.model_runner import ModelRunner
from pagedcore.runtime.prefill_graphs import max_graph_tokens
from pagedcore.runtime.probe import DeviceMemory, device_memory, measure_activations, measure_graphs, profiling_plan, warming_plans
from pagedcore.swap.tier import make_host_tier, staging_bytes

logger = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}

FLOAT8 = torch.float8_e4m3fn

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What follows from config, folder and machine before anything is loaded."""

    architecture: ModelArchitecture
    quantization: str | None
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def max_prefill_graph_tokens(self) -> int:
        return max_graph_tokens(self.architecture.num_layer_parameters, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class _Source:
    model_dir: Path
    tokenizer_dir: Path
    name: str


def build_runner(
    config: EngineConfig,
    model_dir: str | Path,
    *,
    model_name: str | None = None,
    tokenizer_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[ModelRunner, EnginePlan]:
    """Load the model, size the KV pool, make the runner. `model_name` is what to call the model where the config does not say;
    `tokenizer_dir` None is the model's folder.

    Raises `ConfigError` for settings that cannot work here, and what `load_model` raises.
    """
    resolved = _resolve(config, Path(model_dir))
    before = device_memory(resolved.device)
    model = _load(config, Path(model_dir), resolved, progress)
    request = _pool_request(config, model, resolved)
    memory = _size_pool(config, model, resolved, request, before)
    max_model_len = resolve_max_model_len(memory, request)
    runner = _make_runner(config, model, resolved, num_blocks=memory.num_blocks, max_model_len=max_model_len)
    if _uses_graphs(config, runner):
        runner.capture_graphs(resolved.max_prefill_graph_tokens)
    source = _Source(Path(model_dir), Path(tokenizer_dir or model_dir), model_name or config.model or Path(model_dir).name)
    longest = min(max_model_len, resolved.max_num_batched_tokens)
    free_bytes = device_memory(torch.device("cpu")).free_bytes
    host_tier = make_host_tier(config, runner, memory, max_tokens=longest, free_host_bytes=free_bytes)
    plan = _engine_plan(config, source, resolved, memory, host_tier, max_model_len, model.linear_backend)
    _report(plan)
    return runner, plan


def load_decoder(config: EngineConfig, model_dir: str | Path, *, progress: Progress | None = None) -> Decoder:
    """The model of a folder as `build_runner` would load it, and nothing around it. Raises the same errors."""
    return _load(config, Path(model_dir), _resolve(config, Path(model_dir)), progress)


def _load(config: EngineConfig, model_dir: Path, resolved: _Resolved, progress: Progress | None) -> Decoder:
    _set_cpu_threads()
    return load_model(
        model_dir,
        dtype=resolved.dtype,
        device=resolved.device,
        load_format=config.load_format,
        seed=config.seed,
        max_model_len=resolved.max_model_len,
        quantization=config.quantization,
        progress=progress,
    )


def resolve_device(name: str) -> torch.device:
    """The device of a `device` setting. Raises `ConfigError` where there is no such one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is {name!r} and this machine has no CUDA device that torch {torch.__version__} can use; use device='cpu'."
        )
    index = name.partition(":")[2]
    if index and (not index.isdigit() or int(index) >= torch.cuda.device_count()):
        raise ConfigError(f"device is {name!r} and this machine has {torch.cuda.device_count()} CUDA devices, counted from cuda:0.")
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def resolve_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a `kv_cache_dtype` setting, for a model of `dtype`."""
    return dtype if name == "auto" else FLOAT8


def resolve_max_num_batched_tokens(config: EngineConfig, device: torch.device) -> int:
    return config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device.type], config.max_num_seqs)


def _set_cpu_threads() -> None:
    """Compute, and read weights, with as many threads as a container's CPU quota pays for."""
    num_threads = num_cpu_threads()
    if num_threads is not None:
        logger.info("the CPU quota pays for %d threads; torch would take %d", num_threads, torch.get_num_threads())
        torch.set_num_threads(num_threads)


def _resolve(config: EngineConfig, model_dir: Path) -> _Resolved:
    architecture = read_architecture(model_dir)
    stored = read_quantization(model_dir, config.quantization)
    device = resolve_device(config.device)
    asked, limit = config.max_model_len, architecture.max_model_len
    if asked != "auto" and asked > limit:
        raise ConfigError(
            f"max_model_len is {asked} and the model was made for at most {limit} tokens; set max_model_len to at most {limit}."
        )
    dtype = resolve_dtype(config.dtype, architecture, device)
    return _Resolved(
        architecture=architecture,
        quantization=None if stored is None else stored.description,
        device=device,
        dtype=dtype,
        kv_cache_dtype=resolve_kv_cache_dtype(config.kv_cache_dtype, dtype),
        max_model_len=limit if asked == "auto" else asked,
        max_num_batched_tokens=resolve_max_num_batched_tokens(config, device),
    )


def _pool_request(config: EngineConfig, model: Decoder, resolved: _Resolved) -> PoolRequest:
    return PoolRequest(
        block_size=config.block_size,
        block_bytes=block_bytes(model.kv_layout, config.block_size, resolved.kv_cache_dtype),
        num_kv_blocks=config.num_kv_blocks,
        max_model_len=resolved.max_model_len,
        is_max_model_len_auto=config.max_model_len == "auto",
    )


def _size_pool(config: EngineConfig, model: Decoder, resolved: _Resolved, request: PoolRequest, before: DeviceMemory) -> MemoryPlan:
    device = resolved.device
    is_cuda = device.type == "cuda"
    activations_bytes, graphs_bytes = _measure(config, model, resolved, before) if is_cuda else (0, 0)
    measured = MeasuredMemory(
        device=str(device),
        total_bytes=before.total_bytes,
        held_by_others_bytes=before.used_bytes,
        weights_bytes=model.num_weight_bytes,
        activations_bytes=activations_bytes + staging_bytes(config, request.block_bytes),
        graphs_bytes=graphs_bytes,
    )
    if is_cuda:
        budget_bytes = cuda_budget_bytes(before.total_bytes, before.used_bytes, config.gpu_memory_utilization)
    else:
        budget_bytes = cpu_budget_bytes(before.free_bytes, model.num_weight_bytes)
    return plan_memory(measured, budget_bytes, request)


def _measure(config: EngineConfig, model: Decoder, resolved: _Resolved, before: DeviceMemory) -> tuple[int, int]:
    """Bytes of the hungriest step, and of the graphs, measured with a pool of one block; every kernel is met on the way."""
    runner = _make_runner(config, model, resolved, num_blocks=1, max_model_len=resolved.max_model_len)
    limits = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "max_model_len": resolved.max_model_len,
        "vocab_size": model.vocab_size,
    }
    activations_bytes = measure_activations(runner, profiling_plan(**limits), model.num_weight_bytes, before, resolved.device)
    with model.shortened():
        for plan in warming_plans(**limits, decodes=_decodes_to_warm(config, model, resolved, runner)):
            runner.submit(plan).result()
    graphs_bytes = measure_graphs(runner, resolved.max_prefill_graph_tokens, resolved.device) if _uses_graphs(config, runner) else 0
    runner.close()
    return activations_bytes, graphs_bytes


def _decodes_to_warm(config: EngineConfig, model: Decoder, resolved: _Resolved, runner: ModelRunner) -> list[tuple[int, int]]:
    """Numbers of rows and contexts with which a step without a graph compiles its attention."""
    if runner.attention_backend != "triton":
        return []
    from pagedcore_kernels.triton_ops.attention_common import card_of
    from pagedcore_kernels.triton_ops.attention_settings import DecodeShape, decodes_to_warm

    kv, num_rows = model.kv_layout, min(config.max_num_seqs, resolved.max_num_batched_tokens)
    sizes = (model.architecture.num_heads, kv.num_kv_heads, kv.head_dim, resolved.dtype.itemsize, resolved.max_model_len)
    return decodes_to_warm(DecodeShape(num_rows, *sizes), card_of(resolved.device))


def _uses_graphs(config: EngineConfig, runner: ModelRunner) -> bool:
    return runner.attention_backend == "triton" and not config.enforce_eager


def _make_runner(config: EngineConfig, model: Decoder, resolved: _Resolved, *, num_blocks: int, max_model_len: int) -> ModelRunner:
    return ModelRunner(
        model,
        model.kv_layout,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.kv_cache_dtype,
        device=resolved.device,
    )


def _engine_plan(
    config: EngineConfig,
    source: _Source,
    resolved: _Resolved,
    memory: MemoryPlan,
    host_tier: HostTierPlan | None,
    max_model_len: int,
    linear_backend: str,
) -> EnginePlan:
    names = _served_names(config, source.name)
    return EnginePlan(
        config=config,
        model_dir=str(source.model_dir),
        tokenizer_dir=str(source.tokenizer_dir),
        model_name=names[0],
        served_model_names=names,
        model_type=resolved.architecture.model_type,
        device=str(resolved.device),
        dtype=_dtype_name(resolved.dtype),
        kv_cache_dtype=_dtype_name(resolved.kv_cache_dtype),
        quantization=resolved.quantization,
        linear_backend=linear_backend,
        attention_backend=select_attention_backend(resolved.device),
        vocab_size=resolved.architecture.vocab_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        overlap=resolved.device.type == "cuda" if config.overlap == "auto" else config.overlap,
        memory=memory,
        host_tier=host_tier,
        eos_token_ids=resolved.architecture.eos_token_ids,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return "fp8_e4m3" if dtype == FLOAT8 else str(dtype).removeprefix("torch.")


def _served_names(config: EngineConfig, model_name: str) -> tuple[str, ...]:
    names = model_name if config.served_model_name is None else config.served_model_name
    return (names,) if isinstance(names, str) else names


def _report(plan: EnginePlan) -> None:
    memory = plan.memory
    logger.info(
        "%s on %s: %s%s, products %s, attention %s, keys and values %s, %d blocks of %d tokens (%.3f GiB)",
        plan.model_name,
        plan.device,
        plan.dtype,
        f" from {plan.quantization}" if plan.quantization else "",
        plan.linear_backend,
        plan.attention_backend,
        plan.kv_cache_dtype,
        memory.num_blocks,
        plan.block_size,
        memory.kv_cache_bytes / 2**30,
    )
    pool_tokens = memory.num_blocks * plan.block_size
    if pool_tokens < plan.max_model_len:
        logger.warning(
            "num_kv_blocks=%d holds %d tokens, less than max_model_len=%d: a request is refused when its prompt and max_tokens need more.",
            memory.num_blocks,
            pool_tokens,
            plan.max_model_len,
        )
