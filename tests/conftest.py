"""What all tests share: nothing but the rules for rooms whose needs are not met here. Builders are in tests/support/."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedcore import garbage

ROOT = Path(__file__).parent.parent


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason, where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device; run `make test-gpu` on a machine that has one"))
