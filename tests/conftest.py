"""What all tests share: nothing but the rules for rooms whose needs are not met here. Builders are in tests/support/."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedcore import garbage

ROOT = Path(__file__).parent.parent
END_TIMEOUT_S = 300.0
COSTS = {"slow": 20, "model": 10, "serve": 10}
"""What a test of a mark takes, roughly, in seconds."""


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _garbage_is_not_held() -> Iterator[None]:
    """The collection when an engine becomes ready takes longer than most tests; what it is for has tests of its own, which want no
    other engine's hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage.GarbageHold, "take", lambda hold: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _certificates_are_read_once() -> Iterator[None]:
    """Each HTTP client would read them for itself, which takes longer than most calls. A context may serve many clients."""
    with pytest.MonkeyPatch.context() as patch:
        for package in ("httpx", "httpx2"):  # `openai` has taken one and then the other
            if importlib.util.find_spec(package) is not None:
                transports = importlib.import_module(f"{package}._transports.default")
                patch.setattr(transports, "create_ssl_context", functools.cache(transports.create_ssl_context))
        yield


def pytest_configure() -> None:
    """A shell that starts something in the background has it ignore Ctrl-C; tests that send it wait for its effect."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected lives as long as the run: full collections, of which there are many, need not walk over it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A timeout is spent once it has failed its test. What then hangs in the end of a fixture, or of an event loop that waits for a
    thread, ends the process, with the stacks of its threads."""
    if getattr(item, "cancel_timeout", None) is None:
        return
    from pytest_timeout import Settings

    item.config.hook.pytest_timeout_cancel_timer(item=item)
    item.config.hook.pytest_timeout_set_timer(item=item, settings=Settings(END_TIMEOUT_S, "thread", False, None))


def _search_as_always() -> None:
    """Hypothesis draws the same examples in every run, without a limit in time: what fails, fails for everybody.
    `--hypothesis-profile search` draws new ones, `--hypothesis-profile check` draws a fifth of them."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    from support.search import CHECK_EXAMPLES, FULL_EXAMPLES

    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("search", patient)
    same = settings(patient, derandomize=True, database=None, max_examples=FULL_EXAMPLES)
    settings.register_profile("same", same)
    settings.register_profile("check", same, max_examples=CHECK_EXAMPLES)
    settings.load_profile("same")


_search_as_always()


def _cost(item: pytest.Item) -> int:
    return next((cost for name, cost in COSTS.items() if item.get_closest_marker(name)), 0)


def _costly_files_first(items: list[pytest.Item]) -> None:
    """So that the processes of `--dist loadfile` end at about the same time (with `--no-loadscope-reorder`)."""
    costs = Counter[Path]()
    for item in items:
        costs[item.path] += _cost(item)
    items.sort(key=lambda item: -costs[item.path])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason, where there is no CUDA device; files that take long come first."""
    _costly_files_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device; run `make test-gpu` on a machine that has one"))
