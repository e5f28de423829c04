"""Which devices LitServe gives its workers, decided without loading torch in the main process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagedcore import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore_adapters._litserve_hooks import num_gpus

Devices = int | list[int] | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Placement:
    """LitServe's `accelerator` and `devices`."""

    accelerator: Literal["cpu", "cuda"]
    devices: int | list[int]


def choose_placement(config: EngineConfig, devices: Devices, workers_per_device: int) -> Placement:
    """Where the workers run. Raises `ConfigError` for devices that the config rules out, or that cannot hold the workers."""
    kind, _, index = config.device.partition(":")
    if kind == "auto":
        kind = "cuda" if num_gpus() else "cpu"
    if kind == "cpu":
        if devices not in ("auto", 1):
            raise ConfigError(f"devices is {devices!r} and the engines run on the CPU; set workers_per_device for several engines.")
        return Placement("cpu", 1)
    gpus = num_gpus()
    if gpus <= int(index or 0):
        raise ConfigError(f"device is {config.device!r} and {gpus} CUDA devices are visible; use another device, or device='cpu'.")
    if index and devices != "auto":
        raise ConfigError(f"device={config.device!r} names one GPU and devices is {devices!r}; give one of them.")
    if workers_per_device * config.gpu_memory_utilization > 1.0:
        raise ConfigError(
            f"{workers_per_device} workers on one GPU, each with gpu_memory_utilization={config.gpu_memory_utilization}, need more than "
            "all its memory; lower gpu_memory_utilization or workers_per_device."
        )
    if index:
        return Placement("cuda", [int(index)])
    return Placement("cuda", gpus if devices == "auto" else devices)
