"""The lock on host memory, with a driver that only keeps books."""

from __future__ import annotations

import gc

import pytest
import torch

from pagedcore.swap.pinned import PinnedMemory


class FakeDriver:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.answer = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.locked[address] = num_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    def check_error(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"CUDA error {code}")

    fake = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return fake


def test_exactly_the_tensors_bytes_are_locked_until_close(driver: FakeDriver) -> None:
    tensor = torch.zeros(5, 7, dtype=torch.int64)
    memory = PinnedMemory(tensor)
    assert driver.locked == {tensor.data_ptr(): 5 * 7 * 8}
    memory.close()
    memory.close()
    assert driver.locked == {}


def test_a_lock_that_is_forgotten_is_given_back_before_its_memory(driver: FakeDriver) -> None:
    memory = PinnedMemory(torch.zeros(4))
    assert len(driver.locked) == 1
    del memory
    gc.collect()
    assert driver.locked == {}


def test_memory_that_cannot_be_locked_raises(driver: FakeDriver) -> None:
    driver.answer = 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        PinnedMemory(torch.zeros(4))
