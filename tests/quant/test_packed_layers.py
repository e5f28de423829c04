"""Which layers stay packed where kernels can multiply them so, and that these mean what the checkpoint says."""

from __future__ import annotations

import gc

import pytest
import torch

from pagedcore.quant import packed_product, quantized_linear
from pagedcore.quant.packed_product import is_packed_on, stays_packed
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore_kernels import dispatch
from support.linear_problems import assert_product
from support.quantized_layers import PACKED_LAYOUTS, Stored, Written, gptq, write_layer

HALF = torch.float16


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has the kernels; the plain torch products take their place."""
    monkeypatch.setattr(quantized_linear, "is_packed_on", lambda device, dtype: dtype == HALF)


def check(written: Written, backend: str, dtype: torch.dtype = HALF) -> None:
    written.layer.repack(written.tensors)
    assert written.layer.backend == backend
    x = torch.randn(5, written.weight.shape[1]).to(dtype)
    expected = x.float() @ written.weight.t()
    assert_product(written.product(x), expected if written.bias is None else expected + written.bias.float())


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("name", PACKED_LAYOUTS)
def test_a_packed_layer_means_what_the_checkpoint_says(name: str) -> None:
    stored = PACKED_LAYOUTS[name]
    check(write_layer([stored], 128, (24,), HALF), f"triton-w{stored.bits}a16")


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("stored", [gptq(act_order=True), gptq(8, 32, symmetric=False)])
def test_packed_parts_are_stacked_with_their_biases(stored: Stored) -> None:
    check(write_layer([stored, stored], 128, (24, 40), HALF, has_bias=True), f"triton-w{stored.bits}a16")


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "parts", [[gptq(symmetric=False)] * 2, [gptq(act_order=True)] * 2, [gptq(), None]], ids=["packed", "act-order", "dense"]
)
def test_outputs_come_in_the_order_asked_for(parts: list[Stored | None], has_bias: bool) -> None:
    """So that the next product finds its inputs in order."""
    written = write_layer(parts, 128, (24, 40), HALF, has_bias=has_bias)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    written.layer.repack(written.tensors, output_order=order)
    x = torch.randn(5, 128).half()
    expected = x.float() @ written.weight.t() + (0.0 if written.bias is None else written.bias.float())
    assert_product(written.product(x), expected[:, order.long()])


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize(("stored", "num_copies"), [(gptq(), 1), (gptq(act_order=True), 2)], ids=["in order", "act-order"])
def test_packing_holds_few_copies_of_the_codes(stored: Stored, num_copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code takes a byte there, twice what is packed of it: each copy more counts in the peak while a model is loaded."""
    written = write_layer([stored, stored], 128, (24, 40), HALF)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    held: list[int] = []
    pack = packed_product.pack_weights

    def code_bytes() -> int:
        gc.collect()
        return sum(
            {one.data_ptr(): one.nbytes for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.dtype == torch.uint8}.values()
        )

    def count(*args: object, **options: object) -> object:
        held.append(code_bytes())
        return pack(*args, **options)

    monkeypatch.setattr(packed_product, "pack_weights", count)
    before = code_bytes()
    written.layer.repack(written.tensors, output_order=order)
    zero_points = 1000
    assert 0 < held[0] - before <= num_copies * 64 * 128 + zero_points


@pytest.mark.usefixtures("packs")
def test_a_layer_says_in_which_order_it_reads_its_inputs() -> None:
    written = write_layer([gptq(act_order=True)], 128, (24,), HALF)
    written.layer.repack(written.tensors)
    order = written.layer.input_order
    assert order is not None
    assert order.dtype == torch.int32
    groups = written.tensors["m.0.g_idx"][order.long()]
    assert torch.equal(groups, torch.arange(128) // 64)
    in_order = write_layer([gptq()], 128, (24,), HALF)
    in_order.layer.repack(in_order.tensors)
    assert in_order.layer.input_order is None


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize(
    "parts",
    [
        [gptq(2)],
        [gptq(3, 32)],
        [gptq(4, 16)],
        [gptq(), None],
        [gptq(4, 64), gptq(4, 32)],
        [gptq(4), gptq(8)],
        [gptq(act_order=True, seed=1), gptq(act_order=True, seed=2)],
    ],
    ids=["2 bits", "3 bits", "group 16", "a part in 16 bit", "two group sizes", "two widths", "two orders"],
)
def test_what_the_kernels_do_not_read_is_dequantized_once(parts: list[Stored | None]) -> None:
    check(write_layer(parts, 128, (24, 40)[: len(parts)], HALF), "dequantized")


@pytest.mark.usefixtures("packs")
def test_float32_activations_are_multiplied_with_a_dense_copy() -> None:
    check(write_layer([gptq()], 128, (24,), torch.float32), "dequantized", torch.float32)


@pytest.mark.usefixtures("packs")
def test_a_packed_layer_holds_its_codes_scales_order_and_bias_and_nothing_else() -> None:
    written = write_layer([gptq(4, 128, act_order=True)], 512, (128,), HALF, has_bias=True)
    written.layer.repack(written.tensors)
    assert written.layer.num_bytes == 128 * 512 // 2 + 128 * 4 * 4 + 512 * 4 + 128 * 2


def test_groups_of_unequal_sizes_do_not_stay_packed() -> None:
    groups = torch.tensor([0] * 40 + [1] * 24)
    ones = torch.ones(4, 2)
    matrix = QuantizedMatrix(torch.zeros(4, 64, dtype=torch.uint8), ones, ones.to(torch.uint8), 4, groups)
    assert not stays_packed(matrix)
    assert stays_packed(QuantizedMatrix(matrix.codes, ones, matrix.zeros, 4, torch.tensor([1] * 32 + [0] * 32)))


def test_weights_stay_packed_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    cuda = torch.device("cuda", 0)
    assert is_packed_on(cuda, torch.float16)
    assert is_packed_on(cuda, torch.bfloat16)
    assert not is_packed_on(cuda, torch.float32)
    assert not is_packed_on(torch.device("cpu"), torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not is_packed_on(cuda, torch.float16)
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not is_packed_on(cuda, torch.float16)
