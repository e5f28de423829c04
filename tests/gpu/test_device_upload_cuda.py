"""Tensors that reach a GPU through pinned memory arrive whole, whatever their size and kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedcore.models.device_upload import DeviceUpload

pytestmark = pytest.mark.gpu

PIECE_BYTES = 1 << 20


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0, 5),
        lambda: torch.randn(100),
        lambda: torch.randn(3, 1 << 18),
        lambda: torch.randn(1 << 20 | 1).bfloat16(),
        lambda: torch.randn(2000, 1501).half().t(),
        lambda: torch.randint(-(1 << 62), 1 << 62, (700, 333)),
        lambda: torch.randint(-128, 127, ((3 << 20) + 1,), dtype=torch.int8),
    ],
    ids=["scalar", "empty", "small", "whole pieces", "an odd bfloat16", "transposed", "int64", "int8"],
)
def test_every_value_arrives(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    upload = DeviceUpload(torch.device("cuda"), PIECE_BYTES)
    for _ in range(3):
        arrived = upload(tensor)
        assert arrived.is_cuda
        assert arrived.dtype == tensor.dtype
        assert torch.equal(arrived.cpu(), tensor)


def test_a_buffer_is_not_filled_again_while_it_is_read() -> None:
    """The device is kept busy, so that every copy waits while the host would be ready for the next."""
    upload = DeviceUpload(torch.device("cuda"), PIECE_BYTES)
    tensors = [torch.full((PIECE_BYTES // 2,), index, dtype=torch.float32) for index in range(12)]
    busy = torch.randn(8192, 8192, device="cuda")
    arrived = []
    for tensor in tensors:
        busy @ busy
        arrived.append(upload(tensor))
    assert all(torch.equal(one.cpu(), tensor) for one, tensor in zip(arrived, tensors, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    """Its copies run on its own stream, which is kept busy."""
    other = torch.device("cuda", 1)
    upload = DeviceUpload(other, PIECE_BYTES)
    tensors = [torch.full((PIECE_BYTES // 2,), index, dtype=torch.float32) for index in range(12)]
    busy = torch.randn(8192, 8192, device=other)
    arrived = []
    for tensor in tensors:
        busy @ busy
        arrived.append(upload(tensor))
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(one.cpu(), tensor) for one, tensor in zip(arrived, tensors, strict=True))
