"""How a row's token is drawn inside `sampling`'s second kernel: among collected candidates, or in passes over the whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedcore_kernels.triton_ops.gumbel import APPROXIMATION_ERROR, add_gumbel

NO_TOKEN = tl.constexpr(2**31 - 1)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _is_before(x, ids, pivot_x, pivot_id) -> tl.tensor:
    """Whether tokens come before the pivot in the order (falling logit, rising id)."""
    return (x > pivot_x) | ((x == pivot_x) & (ids < pivot_id))


@triton.jit
def first_of_largest(values, ids, is_in) -> tuple[tl.tensor, tl.tensor]:
    """The largest value, and the lowest id that has it, among those that are in; tensors of one dimension."""
    values = tl.where(is_in, values, float("-inf"))
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(is_in & (values == best), ids, NO_TOKEN), axis=0)


@triton.jit
def exact_best(noisy, ids, logits_ptr, temperature, key) -> tuple[tl.tensor, tl.tensor]:
    """The largest noisy logit and its token, from approximate ones [rows, columns] whose ids rise.

    Nearly always one token is within their error of the largest. Where nothing is finite: minus infinity and NO_TOKEN.
    """
    largest = tl.max(tl.max(noisy, axis=1), axis=0)
    bound = largest - 2.0 * (APPROXIMATION_ERROR + 1e-6 * tl.abs(largest))
    is_close = (noisy >= bound) & (noisy > float("-inf"))
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    candidate = tl.min(tl.min(tl.where(is_close, ids, NO_TOKEN), axis=1), axis=0)
    while candidate < NO_TOKEN:
        exact = add_gumbel(tl.load(logits_ptr + candidate).to(tl.float32), temperature, key, candidate)
        token = tl.where(exact > best, candidate, token)
        best = tl.maximum(exact, best)
        candidate = tl.min(tl.min(tl.where(is_close & (ids > candidate), ids, NO_TOKEN), axis=1), axis=0)
    return best, token


@triton.jit
def _to_ordered(x) -> tl.tensor:
    """The int64 of a float's place among all floats, -0 before 0."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _from_ordered(place) -> tl.tensor:
    place = place.to(tl.int32)
    return tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)


@triton.jit
def _bisect_bound(x, is_in, count, low, high, SLACK: tl.constexpr) -> tl.tensor:
    """A bound that at least `count` of x reach: exactly as many if there is such a one, else the largest, in steps of SLACK + 1 floats.

    `low` and `high` are places of floats; enough of x reach `low`, and none is above `high`.
    """
    while high - low > SLACK:
        middle = (low + high + 1) >> 1
        num_reached = tl.sum((is_in & (x >= _from_ordered(middle))).to(tl.int32), axis=0)
        if num_reached >= count:
            low = middle
        else:
            high = middle - 1
        if num_reached == count:
            high = middle
    return _from_ordered(low)


@triton.jit
def collect_candidates(
    logits_ptr,
    maxima_ptr,
    groups_ptr,
    vocab_size,
    top_k,
    best,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Collect the ids, rising, of all tokens that reach a bound which at least top_k tokens reach; their number.

    `groups_ptr` has room for NUM_GROUPS groups, and behind them for CANDIDATES ids; a larger number means that some are missing.
    """
    group = tl.arange(0, GROUPS)
    is_group = group < NUM_GROUPS
    maxima = tl.load(maxima_ptr + group, mask=is_group, other=float("-inf"))
    bound = tl.full([], float("-inf"), tl.float32)
    if top_k <= NUM_GROUPS:
        low = _to_ordered(tl.min(tl.where(is_group, maxima, float("inf")), axis=0))
        bound = _bisect_bound(maxima, is_group, top_k, low, _to_ordered(best), 1023)
    is_chosen = is_group & (maxima >= bound)
    tl.store(groups_ptr + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1, group, mask=is_chosen)
    num_chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.debug_barrier()
    num_candidates = tl.zeros([], tl.int32)
    for first in range(0, num_chosen, TILE // GROUP):
        index = first + tl.arange(0, TILE // GROUP)
        chosen = tl.load(groups_ptr + index, mask=index < num_chosen, other=NUM_GROUPS)
        ids = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_in = ((ids < vocab_size) & (x >= bound)).to(tl.int32)
        counts = tl.sum(is_in, axis=1)
        place = num_candidates + (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(is_in, axis=1) - 1
        tl.store(groups_ptr + NUM_GROUPS + place, ids, mask=(is_in > 0) & (place < CANDIDATES))
        num_candidates += tl.sum(counts, axis=0)
    tl.debug_barrier()
    return num_candidates


@triton.jit
def draw_among_candidates(
    logits_ptr, ids_ptr, num_candidates, temperature, top_k, top_p, floor, best, key, CANDIDATES: tl.constexpr
) -> tl.tensor:
    """The drawn token, where the list of rising ids holds the top_k tokens and no more than CANDIDATES."""
    index = tl.arange(0, CANDIDATES)
    is_in = index < num_candidates
    ids = tl.load(ids_ptr + index, mask=is_in, other=0)
    x = tl.load(logits_ptr + ids, mask=is_in, other=float("-inf")).to(tl.float32)
    low = _to_ordered(tl.min(tl.where(is_in, x, float("inf")), axis=0))
    bound = _bisect_bound(x, is_in, tl.minimum(top_k, num_candidates), low, _to_ordered(best), 0)
    is_tied = is_in & (x == bound)
    num_ties_kept = top_k - tl.sum((is_in & (x > bound)).to(tl.int32), axis=0)
    is_in = is_in & (x >= floor) & ((x > bound) | (is_tied & (tl.cumsum(is_tied.to(tl.int32), axis=0) <= num_ties_kept)))
    mass = tl.where(is_in, tl.exp2((x - best) * (_LOG2_E / temperature)), 0.0)
    noisy = add_gumbel(x, temperature, key, ids)
    _, token = first_of_largest(noisy, ids, is_in)
    if top_p < 1.0:
        limit = top_p * tl.sum(mass, axis=0)
        is_in = is_in & _is_before(x, ids, tl.load(logits_ptr + token).to(tl.float32), token)
        mass_before = tl.sum(tl.where(is_in, mass, 0.0), axis=0)
        while (mass_before >= limit) & (mass_before > 0):
            _, token = first_of_largest(noisy, ids, is_in)
            is_in = is_in & _is_before(x, ids, tl.load(logits_ptr + token).to(tl.float32), token)
            mass_before = tl.sum(tl.where(is_in, mass, 0.0), axis=0)
    return token


@triton.jit
def draw_among_all(logits_ptr, vocab_size, token, mass, temperature, top_k, top_p, floor, best, key, TILE: tl.constexpr) -> tl.tensor:
    """The drawn token, from passes over the whole row.

    Without top_k, `token` has the largest noisy logit of the row, or is none, and `mass` is the row's, relative to `best`.
    """
    pivot_x, pivot_id = floor, vocab_size
    knows_mass = (top_k == 0) & (floor == float("-inf"))
    is_drawn = (top_k == 0) & (token < vocab_size)
    if top_k > 0:
        top_x, top_id = _find_pivot(logits_ptr, vocab_size, tl.minimum(top_k, vocab_size), best, TILE)
        pivot_id = tl.where(floor > top_x, pivot_id, top_id)
        pivot_x = tl.maximum(floor, top_x)
    if is_drawn:
        is_drawn = _is_before(tl.load(logits_ptr + token).to(tl.float32), token, pivot_x, pivot_id)
    if is_drawn == 0:
        token = _draw_before(logits_ptr, vocab_size, pivot_x, pivot_id, temperature, key, TILE)
    if top_p < 1.0:
        if knows_mass == 0:
            mass = _mass_before(logits_ptr, vocab_size, pivot_x, pivot_id, temperature, best, TILE)
        pivot_x = tl.load(logits_ptr + token).to(tl.float32)
        mass_before = _mass_before(logits_ptr, vocab_size, pivot_x, token, temperature, best, TILE)
        while (mass_before >= top_p * mass) & (mass_before > 0):
            token = _draw_before(logits_ptr, vocab_size, pivot_x, token, temperature, key, TILE)
            pivot_x = tl.load(logits_ptr + token).to(tl.float32)
            mass_before = _mass_before(logits_ptr, vocab_size, pivot_x, token, temperature, best, TILE)
    return token


@triton.jit
def _mass_before(logits_ptr, vocab_size, pivot_x, pivot_id, temperature, best, TILE: tl.constexpr) -> tl.tensor:
    """Sum of exp((x - best) / temperature) over the tokens before the pivot."""
    scale = _LOG2_E / temperature
    sums = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        sums += tl.where(_is_before(x, ids, pivot_x, pivot_id), tl.exp2((x - best) * scale), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _draw_before(logits_ptr, vocab_size, pivot_x, pivot_id, temperature, key, TILE: tl.constexpr) -> tl.tensor:
    """The token with the largest noisy logit among those before the pivot, of which there is at least one."""
    best_noisy = tl.full([TILE], float("-inf"), tl.float32)
    best_ids = tl.full([TILE], NO_TOKEN, tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        noisy = tl.where(_is_before(x, ids, pivot_x, pivot_id), add_gumbel(x, temperature, key, ids), float("-inf"))
        is_better = noisy > best_noisy
        best_noisy = tl.where(is_better, noisy, best_noisy)
        best_ids = tl.where(is_better, ids, best_ids)
    _, token = first_of_largest(best_noisy, best_ids, best_ids < NO_TOKEN)
    return tl.minimum(token, vocab_size - 1)


@triton.jit
def _find_pivot(logits_ptr, vocab_size, top_k, best, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The pivot before which the top_k tokens lie: about the k-th logit, and one more than the last id that it may have."""
    low = _to_ordered(tl.full([], float("-inf"), tl.float32))
    high = _to_ordered(best)
    first_id = tl.full([], 1, tl.int32)
    last_id = tl.zeros([], tl.int32) + vocab_size
    while low < high:
        middle = (low + high + 1) >> 1
        num_reached = _count_before(logits_ptr, vocab_size, _from_ordered(middle), vocab_size, TILE)
        if num_reached >= top_k:
            low = middle
        else:
            high = middle - 1
        if num_reached == top_k:
            high = middle
            first_id = last_id
    bound = _from_ordered(low)
    while first_id < last_id:
        middle_id = (first_id + last_id) >> 1
        if _count_before(logits_ptr, vocab_size, bound, middle_id, TILE) >= top_k:
            last_id = middle_id
        else:
            first_id = middle_id + 1
    return bound, first_id


@triton.jit
def _count_before(logits_ptr, vocab_size, pivot_x, pivot_id, TILE: tl.constexpr) -> tl.tensor:
    counts = tl.zeros([TILE], tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        counts += ((ids < vocab_size) & _is_before(x, ids, pivot_x, pivot_id)).to(tl.int32)
    return tl.sum(counts, axis=0)
