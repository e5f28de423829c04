"""Which values a setting may have: each bad one is refused with its name, the value and the limit."""

from __future__ import annotations

import re
from numbers import Real
from typing import TYPE_CHECKING

from pagedcore.errors import ConfigError
from pagedcore.shown import shown

if TYPE_CHECKING:
    from pagedcore.config import EngineConfig

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
MAX_BATCH_WAIT_MS = 60_000.0
MAX_SWAP_GIB = 1 << 20
QUANTIZATION_NAMES = ("gptq", "awq", "gptq_marlin", "awq_marlin", "compressed-tensors")


def check_config(c: EngineConfig) -> None:
    """Raises `ConfigError` for the first setting that is none."""
    _check_texts(c)
    _check_choices(c)
    _check_integers(c)
    _check_numbers(c)
    _check_request_log(c)
    _refuse_what_is_not_there_yet(c)


def _check_texts(c: EngineConfig) -> None:
    for name in ("model", "tokenizer", "revision", "chat_template", "download_dir", "metrics_instance", "request_log", "otlp_endpoint"):
        value = getattr(c, name)
        is_text = isinstance(value, str) and bool(value)
        require(is_text or (value is None and name != "metrics_instance"), f"{name} is {shown(value)} and must be text that is not empty.")
    names = (c.served_model_name,) if isinstance(c.served_model_name, str) else c.served_model_name
    is_names = isinstance(names, tuple) and bool(names) and all(isinstance(name, str) and name for name in names)
    require(names is None or is_names, f"served_model_name is {shown(c.served_model_name)} and must be a name or a list of names.")


def _check_choices(c: EngineConfig) -> None:
    for name, choices in (
        ("block_size", BLOCK_SIZES),
        ("dtype", DTYPES),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("load_format", ("auto", "safetensors", "dummy")),
        ("scheduling_policy", ("fcfs", "priority")),
        ("isolation", ("thread", "process")),
        ("metrics_compat", (None, "vllm")),
        ("quantization", (None, *QUANTIZATION_NAMES)),
        ("overlap", (True, False, "auto")),
        ("trust_remote_code", (True, False)),
        ("enforce_eager", (True, False)),
        ("enable_prefix_caching", (True, False)),
        ("skip_tokenizer_init", (True, False)),
    ):
        value = getattr(c, name)
        is_choice = any(isinstance(value, type(choice)) and value == choice for choice in choices)  # 1 is not True, 16.0 is not 16
        require(is_choice, f"{name} is {shown(value)} and must be one of {', '.join(map(str, choices))}.")
    is_device = isinstance(c.device, str) and DEVICE_PATTERN.fullmatch(c.device) is not None
    require(is_device, f"device is {shown(c.device)} and must be auto, cpu, cuda or cuda:N.")


def _check_integers(c: EngineConfig) -> None:
    for name in ("max_num_seqs", "tensor_parallel_size", "max_preemptions"):
        value = getattr(c, name)
        require(_is_int(value) and value >= 1, f"{name} is {shown(value)} and must be an integer of at least 1.")
    for name in ("max_num_batched_tokens", "num_kv_blocks", "max_waiting_requests", "max_running_per_tenant", "max_waiting_per_tenant"):
        value = getattr(c, name)
        is_count = value is None or (_is_int(value) and value >= 1)
        require(is_count, f"{name} is {shown(value)} and must be None or an integer of at least 1.")
    require(
        c.max_model_len == "auto" or (_is_int(c.max_model_len) and c.max_model_len >= 1),
        f'max_model_len is {shown(c.max_model_len)} and must be "auto" or an integer of at least 1.',
    )
    require(_is_int(c.seed), f"seed is {shown(c.seed)} and must be an integer.")


def _check_numbers(c: EngineConfig) -> None:
    """NaN is in no range."""
    for name in ("gpu_memory_utilization", "watermark_fraction", "max_batch_wait_ms", "swap_space"):
        require(is_number(getattr(c, name)), f"{name} is {shown(getattr(c, name))} and must be a number.")
    util, watermark, wait_ms = c.gpu_memory_utilization, c.watermark_fraction, c.max_batch_wait_ms
    require(0.0 < util <= 1.0, f"gpu_memory_utilization is {util!r} and must be above 0 and at most 1.")
    require(0.0 <= watermark < 1.0, f"watermark_fraction is {watermark!r} and must be at least 0 and below 1.")
    require(0.0 <= wait_ms <= MAX_BATCH_WAIT_MS, f"max_batch_wait_ms is {wait_ms!r} and must be between 0 and {MAX_BATCH_WAIT_MS:g}.")
    require(0 <= c.swap_space <= MAX_SWAP_GIB, f"swap_space is {c.swap_space!r} GiB and must be from 0 to {MAX_SWAP_GIB}.")
    is_found_again = c.swap_space == 0 or c.enable_prefix_caching
    require(is_found_again, f"swap_space={c.swap_space!r} needs prefix caching, which finds blocks again; set enable_prefix_caching.")
    share = c.cache_fraction_per_tenant
    is_fraction = share is None or (is_number(share) and 0.0 < share <= 1.0)
    require(is_fraction, f"cache_fraction_per_tenant is {shown(share)} and must be None or a number above 0 and at most 1.")
    has_cache = share is None or c.enable_prefix_caching
    require(has_cache, f"cache_fraction_per_tenant={share!r} divides the prefix cache, which is off; set enable_prefix_caching.")


def _check_request_log(c: EngineConfig) -> None:
    sample, slow_ms = c.request_log_sample, c.slow_request_ms
    is_share = is_number(sample) and 0.0 <= sample <= 1.0
    require(is_share, f"request_log_sample is {shown(sample)} and must be a number of at least 0 and at most 1.")
    is_time = slow_ms is None or (is_number(slow_ms) and 0.0 <= slow_ms < float("inf"))
    require(is_time, f"slow_request_ms is {shown(slow_ms)} and must be None or a number of milliseconds of at least 0.")
    has_use = c.request_log is not None or (sample == 1.0 and slow_ms is None)
    require(has_use, "request_log_sample and slow_request_ms choose the lines of request_log; set request_log to a file, or to -.")
    is_url = c.otlp_endpoint is None or c.otlp_endpoint.startswith(("http://", "https://"))
    require(is_url, f"otlp_endpoint is {shown(c.otlp_endpoint)} and must begin with http:// or https://.")


def _refuse_what_is_not_there_yet(c: EngineConfig) -> None:
    """Settings whose work this version does not do: refused, never accepted and ignored."""
    require(c.kv_cache_dtype != "int8", "kv_cache_dtype='int8' is not offered by this version; use 'fp8' or 'auto'.")
    require(
        c.tensor_parallel_size == 1,
        f"tensor_parallel_size={c.tensor_parallel_size} is not offered by this version; use 1, and run one engine a GPU.",
    )


def require(ok: bool, message: str) -> None:
    """Raises `ConfigError` with the message unless all is well."""
    if not ok:
        raise ConfigError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)
