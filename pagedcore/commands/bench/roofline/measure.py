"""Each case checked, timed, and set against its roof."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedcore.commands.bench.results import Point
from pagedcore.commands.bench.roofline.attention import attention_cases
from pagedcore.commands.bench.roofline.case import Case, Shape, Work
from pagedcore.commands.bench.roofline.pointwise import pointwise_cases
from pagedcore.commands.bench.roofline.products import product_cases
from pagedcore.commands.bench.roofline.roofs import Roofs, measure_roofs
from pagedcore.commands.bench.roofline.timer import time_calls, time_replays
from pagedcore.commands.bench.spread import Spread
from pagedcore.errors import EngineError
from pagedcore.models.progress import Progress
from pagedcore.runtime.triton_attention import takes_cudnn
from pagedcore_kernels.triton_ops.attention_common import card_of

MAX_RELATIVE_ERROR = 1e-2


def all_cases(shape: Shape) -> Iterator[Case]:
    capability = card_of(torch.device(shape.device)).capability
    has_cudnn = takes_cudnn(capability=capability, head_dim=shape.head_dim, element_bytes=shape.itemsize, sliding_window=None)
    yield from attention_cases(shape, has_cudnn=has_cudnn)
    yield from product_cases(shape)
    yield from pointwise_cases(shape)


def measure_kernels(shape: Shape, num_rounds: int, progress: Progress) -> tuple[Roofs, list[Point]]:
    """Raises `EngineError` for a kernel whose result is wrong: nothing is timed that is."""
    torch.manual_seed(0)
    cases, points = list(all_cases(shape)), []
    progress("kernels", 0, len(cases))
    roofs = measure_roofs(shape.dtype, num_rounds)
    for number, case in enumerate(cases, 1):
        points.append(_measure(case, roofs, num_rounds))
        torch.cuda.empty_cache()
        progress("kernels", number, len(cases))
    return roofs, points


def point_of(case: Case, us: Spread, roofs: Roofs) -> Point:
    """Share: what the roof would need over what it took."""
    per_s = case.amount / us.value * 1e6
    return {
        "kernel": case.kernel,
        "work": case.work,
        "us": us,
        "roof": case.roof,
        "rate": per_s / 1e12,
        "unit": "TFLOP/s" if case.roof == "matmul" else "TB/s",
        "share": per_s / roofs.per_s(case.roof),
    }


def check(name: str, work: Work) -> None:
    """Raise `EngineError` where the first call is not what the reference gives."""
    error = work.relative_error()
    if not error <= MAX_RELATIVE_ERROR:
        raise EngineError(f"{name}: the result differs from the reference by {error:.1e}; nothing wrong is timed.")


def _measure(case: Case, roofs: Roofs, num_rounds: int) -> Point:
    work = case.make()
    check(case.name, work)
    if case.captures:
        times = time_replays(work.calls, case.amount / roofs.per_s(case.roof) * 1e6 + 1, num_rounds)
    else:
        times = time_calls(work.calls[0], num_rounds)
    return point_of(case, Spread.median_of(times), roofs)
