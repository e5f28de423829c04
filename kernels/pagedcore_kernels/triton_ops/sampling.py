"""One token a row from its logits, without sorting the vocabulary and without a wait: two launches, nothing read by the host.

What is kept by min_p, top_k and top_p is always a head of the order (falling logit, rising id), so a set of tokens is a pivot
(logit, id): the tokens before it. The largest noisy token of a set that lies within a smaller head is the largest of that head,
too; one that does not is the next pivot. So top_p needs no threshold: a candidate is taken if the mass before it is below top_p,
and otherwise the draw is repeated before it, which is seldom more than once or twice.

top_k does need the k-th logit. The k-th largest of the maxima of small groups of tokens is a lower bound that few tokens exceed
beside those wanted; these are collected, and the exact one is bisected in registers. Where k or the number of collected tokens
is too large for that, it is bisected over the whole row: right, and slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.reference.sample_tokens import GREEDY_TEMPERATURE, STATUS_ALL_MASKED, STATUS_NOT_FINITE, DrawnTokens
from pagedcore_kernels.triton_ops.attention_common import INTERPRETED
from pagedcore_kernels.triton_ops.gumbel import approximate_gumbel, noise_key
from pagedcore_kernels.triton_ops.launch import dependent_launch
from pagedcore_kernels.triton_ops.sampling_draw import (
    NO_TOKEN,
    collect_candidates,
    draw_among_all,
    draw_among_candidates,
    exact_best,
    first_of_largest,
)

MAX_GROUPS = 1024
MIN_GROUP = 64
FEW_ROWS = 16
SMALL_SLICE, LARGE_SLICE = 1024, 4096
CANDIDATES = 1024
TILE = 4096
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_NOT_FINITE = tl.constexpr(STATUS_NOT_FINITE)
_ALL_MASKED = tl.constexpr(STATUS_ALL_MASKED)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SETTINGS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "output_indices_ptr"]
"""One number a row is read of each: wherever they begin, one kernel serves."""


@dataclass(frozen=True, slots=True)
class SamplingLaunch:
    """How a row is cut: into slices, one a program, and these into groups whose maxima are kept."""

    vocab_size: int
    slice_size: int
    group_size: int

    @property
    def num_slices(self) -> int:
        return triton.cdiv(self.vocab_size, self.slice_size)

    @property
    def num_groups(self) -> int:
        return triton.cdiv(self.vocab_size, self.group_size)


def choose_sampling_launch(vocab_size: int, num_rows: int) -> SamplingLaunch:
    """Small slices while few rows leave the card idle; groups as small as their number allows."""
    group_size = max(MIN_GROUP, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_GROUPS)))
    return SamplingLaunch(vocab_size, max(group_size, SMALL_SLICE if num_rows < FEW_ROWS else LARGE_SLICE), group_size)


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_indices: Tensor,
    may_draw: bool = True,
    is_masked: bool = False,
    launch: SamplingLaunch | None = None,
) -> DrawnTokens:
    """Draw one token a row; reference: `reference.sample_tokens.sample_tokens`.

    Rows of `logits` [N, V] are contiguous, at any stride. Tokens whose logits differ in less than the temperature's rounding keep the
    order of their logits. Raises ValueError for shapes that do not fit.
    """
    num_rows, vocab_size = logits.shape
    settings = (temperature, top_k, top_p, min_p, seeds, output_indices)
    if logits.stride(1) != 1 or not all(x.shape == (num_rows,) and x.is_contiguous() for x in settings):
        raise ValueError(f"Rows of logits, and each setting of its {num_rows} rows, must be contiguous.")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    status = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    if num_rows == 0:
        return DrawnTokens(token_ids, status)
    cut = launch or choose_sampling_launch(vocab_size, num_rows)
    num_slices, num_groups = cut.num_slices, cut.num_groups
    work = torch.empty(num_rows, 5 * num_slices + 2 * num_groups + CANDIDATES, dtype=torch.int32, device=logits.device)
    constants = {"NUM_GROUPS": num_groups, "GROUP": cut.group_size, "MAY_DRAW": may_draw}
    _read_slices[(num_rows, num_slices)](
        logits,
        *settings,
        work.view(torch.float32),
        work,
        vocab_size,
        num_slices,
        logits.stride(0),
        work.stride(0),
        SLICE=cut.slice_size,
        FAST=not INTERPRETED,
        num_warps=4 if cut.slice_size < LARGE_SLICE else 8,
        **constants,
        **dependent_launch(logits),
    )
    _choose[(num_rows,)](
        logits,
        *settings,
        work.view(torch.float32),
        work,
        token_ids,
        status,
        vocab_size,
        num_slices,
        int(is_masked),
        logits.stride(0),
        work.stride(0),
        SLICES=triton.next_power_of_2(triton.cdiv(vocab_size, min(cut.slice_size, SMALL_SLICE))),
        GROUPS=triton.next_power_of_2(num_groups),
        TILE=TILE,
        CANDIDATES=CANDIDATES,
        num_warps=8,
        **constants,
        **dependent_launch(logits),
    )
    return DrawnTokens(token_ids, status)


@triton.jit
def _limit(top_k, vocab_size) -> tl.tensor:
    """0 where top_k keeps the whole vocabulary and one token is not all of it."""
    return tl.where((top_k >= vocab_size) & (top_k > 1), 0, top_k).to(tl.int32)


@triton.jit(do_not_specialize=["num_slices"], do_not_specialize_on_alignment=_SETTINGS)
def _read_slices(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    output_indices_ptr,
    work_ptr,
    work_ids_ptr,
    vocab_size,
    num_slices,
    logits_stride,
    work_stride,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MAY_DRAW: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One slice of one row: its largest logit and that token, the maxima of its groups, the largest noisy logit, and its mass for top_p.

    A row of the work space: largest logits [num_slices] (NaN if there is one), their ids, largest noisy logits, their ids,
    masses relative to the slice's largest; then maxima of groups [NUM_GROUPS], chosen groups [NUM_GROUPS], candidates.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits_ptr += row * logits_stride
    work_ptr += row * work_stride
    work_ids_ptr += row * work_stride
    group = part * (SLICE // GROUP) + tl.arange(0, SLICE // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = ids < vocab_size
    x = tl.load(logits_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
    maxima = tl.max(x, axis=1)
    largest = tl.max(maxima, axis=0)
    has_nan = tl.max(tl.max((x != x).to(tl.int32), axis=1), axis=0) > 0
    first = tl.min(tl.min(tl.where(x == largest, ids, NO_TOKEN), axis=1), axis=0)
    tl.store(work_ptr + part, tl.where(has_nan, float("nan"), largest))
    tl.store(work_ids_ptr + num_slices + part, first)
    if MAY_DRAW:
        tl.store(work_ptr + 5 * num_slices + group, maxima, mask=group < NUM_GROUPS)
        temperature = tl.load(temperature_ptr + row)
        if (temperature >= _GREEDY) & (_limit(tl.load(top_k_ptr + row), vocab_size) == 0):
            key = noise_key(tl.load(seeds_ptr + row), tl.load(output_indices_ptr + row))
            noisy = tl.where(inside, x * (1.0 / temperature) + approximate_gumbel(key, ids, FAST), float("-inf"))
            best, token = exact_best(noisy, ids, logits_ptr, temperature, key)
            tl.store(work_ptr + 2 * num_slices + part, best)
            tl.store(work_ids_ptr + 3 * num_slices + part, token)
            if tl.load(top_p_ptr + row) < 1.0:
                mass = tl.where(x > float("-inf"), tl.exp2((x - largest) * (_LOG2_E / temperature)), 0.0)
                tl.store(work_ptr + 4 * num_slices + part, tl.sum(tl.sum(mass, axis=1), axis=0))


@triton.jit(do_not_specialize=["num_slices", "is_masked"], do_not_specialize_on_alignment=_SETTINGS)
def _choose(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    output_indices_ptr,
    work_ptr,
    work_ids_ptr,
    token_ids_ptr,
    status_ptr,
    vocab_size,
    num_slices,
    is_masked,
    logits_stride,
    work_stride,
    GROUP: tl.constexpr,
    SLICES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAY_DRAW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row's token and status, from what `_read_slices` left in the work space."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    work_ptr += row * work_stride
    work_ids_ptr += row * work_stride
    part = tl.arange(0, SLICES)
    is_slice = part < num_slices
    largest = tl.load(work_ptr + part, mask=is_slice, other=float("-inf"))
    has_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
    firsts = tl.load(work_ids_ptr + num_slices + part, mask=is_slice, other=NO_TOKEN)
    best, token = first_of_largest(largest, firsts, is_slice)
    status = tl.where(has_nan | (best == float("inf")) | (best == float("-inf")), _NOT_FINITE, 0)
    status = tl.where((is_masked != 0) & (best == float("-inf")) & (has_nan == 0), _ALL_MASKED, status)
    if MAY_DRAW:
        temperature = tl.load(temperature_ptr + row)
        top_k = _limit(tl.load(top_k_ptr + row), vocab_size)
        if (temperature >= _GREEDY) & (top_k != 1) & (status == 0):
            key = noise_key(tl.load(seeds_ptr + row), tl.load(output_indices_ptr + row))
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            floor = tl.where(min_p > 0, best + temperature * tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))
            num_candidates = CANDIDATES + 1
            groups_ptr = work_ids_ptr + 5 * num_slices + NUM_GROUPS
            if (top_k > 0) & ((top_k <= NUM_GROUPS) | (vocab_size <= CANDIDATES)):
                maxima_ptr = work_ptr + 5 * num_slices
                num_candidates = collect_candidates(
                    logits_ptr, maxima_ptr, groups_ptr, vocab_size, top_k, best, GROUP, NUM_GROUPS, GROUPS, TILE, CANDIDATES
                )
            if num_candidates <= CANDIDATES:
                ids_ptr = groups_ptr + NUM_GROUPS
                token = draw_among_candidates(logits_ptr, ids_ptr, num_candidates, temperature, top_k, top_p, floor, best, key, CANDIDATES)
            else:
                is_known = is_slice & (top_k == 0)
                noisy = tl.load(work_ptr + 2 * num_slices + part, mask=is_known, other=float("-inf"))
                noisy_ids = tl.load(work_ids_ptr + 3 * num_slices + part, mask=is_known, other=NO_TOKEN)
                has_mass = tl.where(top_p < 1.0, 1, 0)
                masses = tl.load(work_ptr + 4 * num_slices + part, mask=is_known & (has_mass > 0), other=0.0)
                masses = tl.where(masses > 0, masses * tl.exp2((largest - best) * (_LOG2_E / temperature)), 0.0)
                _, noisiest = first_of_largest(noisy, noisy_ids, is_known)
                mass = tl.sum(masses, axis=0)
                token = draw_among_all(logits_ptr, vocab_size, noisiest, mass, temperature, top_k, top_p, floor, best, key, TILE)
    tl.store(token_ids_ptr + row, tl.minimum(token, vocab_size - 1).to(tl.int64))
    tl.store(status_ptr + row, status.to(tl.int8))
