"""How busy a device is by its driver's own count (NVML), told to the metrics. Without the package nvidia-ml-py nothing is told."""

from __future__ import annotations

import importlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from pagedcore.observe.recorder import Recorder

INTERVAL_S = 1.0
"""Between two questions: the driver's count covers at most the second before."""

logger = logging.getLogger(__name__)


class DeviceMeter:
    """One device of this machine, asked through NVML. Raises `LookupError` where there is no such device, no NVML or no count."""

    def __init__(self, uuid: str) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise LookupError("nvidia-ml-py is not installed") from error
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            raise LookupError(str(error)) from error
        self.read()

    def read(self) -> float:
        """Share of the last moments in which a kernel ran on the device, whoever's."""
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0
        except self._nvml.NVMLError as error:
            raise LookupError(str(error)) from error


def watch_device(recorder: Recorder, uuid: str | None, *, interval_s: float = INTERVAL_S) -> threading.Thread | None:
    """Start a thread that tells the recorder how busy the device is, until that is closed. None where nothing can be told."""
    if uuid is None:
        return None
    try:
        meter = DeviceMeter(uuid)
    except LookupError as error:
        logger.info("pagedcore_device_utilization_ratio is left out: %s.", error)
        return None
    target = (weakref.ref(recorder), meter.read, interval_s)
    thread = threading.Thread(target=_tell, args=target, name="pagedcore-device-meter", daemon=True)
    thread.start()
    return thread


def _tell(reference: weakref.ref[Recorder], read: Callable[[], float], interval_s: float) -> None:
    """Holds the recorder for a moment only, so that a forgotten engine can be collected."""
    while _tell_once(reference(), read):
        time.sleep(interval_s)


def _tell_once(recorder: Recorder | None, read: Callable[[], float]) -> bool:
    try:
        return recorder is not None and recorder.set_device_utilization(read())
    except LookupError as error:
        logger.warning("pagedcore_device_utilization_ratio stays at its last value: %s.", error)
        return False
