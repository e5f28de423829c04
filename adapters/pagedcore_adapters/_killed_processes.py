"""What a killed process left in the folder of metrics: its gauges are nobody's, and the requests that it took with it are counted.

A process writes a received request to its file before it works on it, and an ended one before it tells its caller. So what is
missing between the two is what callers waited for when it was killed. It is added as failed to that very file, which nobody else
writes any more: whoever looks again finds nothing missing.

prometheus_client offers none of this in public: its file of counters is a `MmapedDict` of (value, time) by `mmap_key`.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pagedcore.metrics_compat.vllm_names import COUNTERS, VLLM_FAMILIES
from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES
from pagedcore.observe.ledger import Key
from pagedcore.remote.numbers import PROMPT_TOKENS_LEFT

RECEIVED, ENDED, ABANDONED = "pagedcore_received_requests_total", "pagedcore_requests_total", "pagedcore_abandoned_prompt_tokens_total"

logger = logging.getLogger(__name__)

Engine = tuple[str, ...]
"""Values of `BASE_LABELS`."""


def settle_process(pid: int, folder: str | Path) -> int:
    """Count the requests that this process, which has ended, took with it, and forget its gauges. Returns how many there were."""
    _forget_gauges(pid, folder)
    path = Path(folder) / f"counter_{pid}.db"
    if not path.is_file():
        return 0
    try:
        with _opened(path) as counters:
            return sum(counters.settle(engine) for engine in counters.engines())
    except (OSError, ValueError, RuntimeError, struct.error) as error:  # all that a damaged or foreign file gives
        logger.error("What process %d took with it could not be counted: %s: %s", pid, type(error).__name__, error)
        return 0


def _forget_gauges(pid: int, folder: str | Path) -> None:
    from prometheus_client.multiprocess import mark_process_dead

    is_done = False
    while not is_done:
        with suppress(FileNotFoundError):  # another process, which started at the same time, has just removed that file
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
            is_done = True


class _Counters:
    """Owns the file of counters of a dead process, while it is open."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self._metric_names: dict[str, tuple[str, str]] = {}
        """Sample name -> what prometheus_client calls its family, and the help text."""
        self._found: defaultdict[Engine, dict[Key, float]] = defaultdict(dict)
        for text, value, _ in values.read_all_values():
            metric_name, name, labels, help_text = json.loads(text)
            if name.startswith(("pagedcore_", "vllm:")) and "engine" in labels:
                self._metric_names[name] = metric_name, help_text
                own = tuple(labels[label] for label in _labels_of(name) if label in labels)
                self._found[tuple(labels[label] for label in BASE_LABELS)][name, *own] = value

    def engines(self) -> list[Engine]:
        return list(self._found)

    def settle(self, engine: Engine) -> int:
        """Let what was received be what has ended, and what was looked up have a fate. Returns how many requests were missing."""
        found = self._found[engine]
        num_left = sum(PROMPT_TOKENS_LEFT.get(key[0], 0) * value for key, value in found.items())
        self._add(engine, (ABANDONED,), max(0.0, num_left))
        lost = _missing(found)
        for labels, count in lost.items():
            self._add(engine, (ENDED, "error", "", *labels), count)
        return lost.total()

    def _add(self, engine: Engine, key: Key, amount: float) -> None:
        """Also under vLLM's names, where the process had them."""
        if not amount:
            return
        self._write(engine, key, amount)
        for other, relabel in COUNTERS.get(key[0], ()):
            values = relabel(*key[1:])
            if values is not None:
                self._write(engine, (other, *values), amount)

    def _write(self, engine: Engine, key: Key, amount: float) -> None:
        from prometheus_client.mmap_dict import mmap_key

        name, *values = key
        if name not in self._metric_names:
            return
        metric_name, help_text = self._metric_names[name]
        text = mmap_key(metric_name, name, [*BASE_LABELS, *_labels_of(name)], [*engine, *values], help_text)
        value, _ = self._values.read_value(text)
        self._values.write_value(text, value + amount, time.time())


@contextmanager
def _opened(path: Path) -> Iterator[_Counters]:
    """One process at a time settles a file."""
    from prometheus_client.mmap_dict import MmapedDict

    with path.open("rb") as lock:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        list(MmapedDict.read_all_values_from_file(str(path)))  # type: ignore[no-untyped-call]  # raises where the next leaves a file open
        with closing(MmapedDict(str(path))) as values:  # type: ignore[no-untyped-call]
            yield _Counters(values)


def _labels_of(name: str) -> tuple[str, ...]:
    """Beside `BASE_LABELS`."""
    family = FAMILIES.get(name) or VLLM_FAMILIES.get(name)
    return () if family is None else family.labels


def _missing(found: dict[Key, float]) -> Counter[Key]:
    """(adapter, tenant, class) -> received requests that have not ended.

    Beyond the bound of label values two counts of one request may stand under different ones; their sum is right all the same.
    """
    missing: Counter[Key] = Counter()
    for (name, *values), value in found.items():
        if name == RECEIVED:
            missing[tuple(values)] += round(value)
        elif name == ENDED:
            missing[tuple(values[2:])] -= round(value)
    num_too_many = -(-missing).total()
    for labels, count in missing.items():
        if count > 0:
            missing[labels] -= min(count, num_too_many)
            num_too_many -= min(count, num_too_many)
    return +missing
