"""What `pagedcore bench kernels` times, under the interpreter: each case against its reference."""

from __future__ import annotations

import pytest
import torch

from pagedcore.commands.bench.roofline.attention import attention_cases
from pagedcore.commands.bench.roofline.case import Case, Shape
from pagedcore.commands.bench.roofline.measure import check
from pagedcore.commands.bench.roofline.pointwise import pointwise_cases
from pagedcore.commands.bench.roofline.products import product_cases

SHAPE = Shape(4, 2, 64, 48, 80, 300, torch.float32, device="cpu", rotated_bytes=250_000)
CASES = [
    *attention_cases(SHAPE, has_cudnn=True, decodes=[(3, 37)], prefills=[(20, 0), (20, 15)]),
    *product_cases(SHAPE, [1, 3]),
    *pointwise_cases(SHAPE, [5, 40], [1, 3]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_gives_what_its_reference_gives(case: Case) -> None:
    torch.manual_seed(0)
    check(case.name, case.make())


def test_calls_rotate_among_buffers_that_hold_what_was_asked_for() -> None:
    work = next(case for case in CASES if case.kernel == "decode attention").make()
    assert len(work.calls) == 2, "of 147,456 bytes each"
    assert not torch.equal(work.calls[0](), work.calls[1]())
