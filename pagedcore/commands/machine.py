"""Facts about this machine, each read in one place: Python, packages, memory, processor, GPUs, the model cache."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Literal

from pagedcore.extras import extras, missing, version_of

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "transformers", "prometheus-client", "fastapi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a model would run."""

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that `pagedcore doctor` reports, before any advice."""

    python: str
    platform: str
    num_cpus: int
    cpu_has_bf16: bool
    cpu_has_int4: bool
    """4-bit weights are multiplied as they are, with dtype=bfloat16 and few rows; else a dequantized copy is."""
    host_total_bytes: int
    host_free_bytes: int
    packages: dict[str, str | None]
    """Distribution -> version; None is not installed."""
    extras: dict[str, list[str]]
    """Extra -> distributions of it that are not installed."""
    cuda: str | None
    """The CUDA version that torch was built for."""
    devices: list[Device] = field(default_factory=list)
    model_cache: str = ""
    embedded_model: Literal["ready", "not fetched yet"] = "not fetched yet"


def read_machine() -> Machine:
    """Look at everything once. Imports torch."""
    import torch

    from pagedcore.quant.cpu import cpu_has_bf16_units
    from pagedcore.quant.cpu_int4 import has_fast_int4
    from pagedcore.runtime.probe import device_memory

    host = device_memory(torch.device("cpu"))
    cpu = Device(kind="cpu", name=platform.machine(), total_bytes=host.total_bytes, free_bytes=host.free_bytes)
    cache, is_ready = _model_cache()
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        num_cpus=usable_cpus(),
        cpu_has_bf16=cpu_has_bf16_units(),
        cpu_has_int4=has_fast_int4(),
        host_total_bytes=host.total_bytes,
        host_free_bytes=host.free_bytes,
        packages={name: version_of(name) for name in PACKAGES},
        extras={extra: missing(distributions) for extra, distributions in extras().items()},
        cuda=torch.version.cuda,
        devices=[_gpu(index) for index in range(torch.cuda.device_count())] or [cpu],
        model_cache=cache,
        embedded_model="ready" if is_ready else "not fetched yet",
    )


def usable_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _model_cache() -> tuple[str, bool]:
    from pagedcore.models.cache_folder import cache_root, is_whole
    from pagedcore.models.embedded import embedded_folder

    return str(cache_root()), is_whole(embedded_folder())


def _gpu(index: int) -> Device:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return Device(
        kind="cuda",
        name=torch.cuda.get_device_name(index),
        total_bytes=total,
        free_bytes=free,
        compute_capability=f"{major}.{minor}",
    )
