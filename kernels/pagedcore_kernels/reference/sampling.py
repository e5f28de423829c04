"""Sampling ops on logits of many rows, in plain torch. N rows, V vocabulary, C candidates of a row.

The order in which a caller applies them: `apply_penalties`, `add_to_logits` (bias, masks), `mask_tokens`, temperature, then for
drawing `order_candidates`, `keep_candidates` and the largest of value plus `gumbel_noise`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_INT32_SIGN = 1 << 31
_MASKED_ROWS = 64
"""Rows that `mask_tokens` spells out at once: a word for each token."""


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    seq_lens: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """x = x / r if x > 0 else x * r for tokens seen in prompt or output; then x -= presence * [n > 0] + frequency * n,
    n the occurrences in the output. Changes `logits` [N, V] (fp32).

    `token_ids` [N, L] holds prompt and output of each row up to `seq_lens` [N]; what lies beyond is ignored.
    """
    positions = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = positions < seq_lens[:, None]
    is_output = is_known & (positions >= prompt_lens[:, None])
    ids = token_ids.long().masked_fill(~is_known, 0)
    seen = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, ids, is_known.int())
    repetition = torch.where(seen > 0, repetition[:, None], 1.0)  # [N, V]
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    counts = seen.zero_().scatter_add_(1, ids, is_output.int())
    logits.sub_(counts * frequency[:, None]).sub_((counts > 0) * presence[:, None])


def add_to_logits(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i]; minus infinity masks the token. Changes `logits`."""
    logits.index_put_((rows, token_ids), values, accumulate=True)


def mask_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """logits[rows[i], v] = minus infinity unless bit v % 32 of allowed[i, v / 32] is set. Changes `logits`.

    `allowed` is [R, W] int32; tokens beyond 32 W are masked.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, words in zip(rows.split(_MASKED_ROWS), allowed.split(_MASKED_ROWS), strict=True):
        is_allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        is_allowed = torch.nn.functional.pad(is_allowed, (0, logits.shape[1] - is_allowed.shape[1]))
        logits.index_copy_(0, row, logits.index_select(0, row).masked_fill_(~is_allowed, -math.inf))


def order_candidates(logits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The `num_candidates` largest logits of each row, falling, ties by rising token id: values and ids, both [N, C]."""
    vocab_size = logits.shape[1]
    if num_candidates >= vocab_size:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    keys = _order_keys(logits)
    best = torch.topk(keys, num_candidates, dim=-1).values
    ids = vocab_size - 1 - (best & _MASK_32)
    return logits.gather(1, ids), ids


def _order_keys(logits: Tensor) -> Tensor:
    """Distinct int64 keys in the order of (logit, lower token id first): the float's bits above, the id below."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes the two zeros equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return (ordered << 32) | ids


def keep_candidates(
    values: Tensor, *, min_p: Tensor, top_k: Tensor, top_p: Tensor, log_total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Which candidates min_p, then top_k, then top_p leave: the mask [N, C], and the mass [N] that the candidates cover.

    `values` [N, C] are logits in falling order. top_k of 0 keeps all. `log_total` [N] is the log of the sum of
    exp(logit) that top_p is a share of, when tokens beyond the candidates belong to it.
    """
    ranks = torch.arange(values.shape[1], device=values.device)
    kept = values >= values[:, :1] + torch.log(min_p)[:, None]
    kept &= (ranks < top_k[:, None]) | (top_k[:, None] == 0)
    kept_values = values.masked_fill(~kept, -math.inf)
    if log_total is None:
        log_total = torch.logsumexp(kept_values, dim=-1)
    probabilities = torch.exp(kept_values - log_total[:, None])
    covered = probabilities.cumsum(dim=-1)
    kept &= ((covered - probabilities) < top_p[:, None]) | (top_p[:, None] >= 1.0) | (ranks == 0)
    return kept, covered[:, -1]


def gumbel_noise(seeds: Tensor, output_indices: Tensor, token_ids: Tensor) -> Tensor:
    """g = -log(-log(1 - u)), u in (0, 1) a function of (seed, output index, token id) alone. fp32, [N, C].

    A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): no state, the same
    integers on every device. `key = mix64(mix64(seed) + output_index * 0x9E3779B97F4A7C15)` with the finaliser of
    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of Stafford's variant 13); its halves k0, k1 key two rounds of
    a 32-bit finaliser (constants by Wellons, "Prospecting for hash functions", 2018):
    `h = mix32(mix32(token_id * 0x9E3779B1 + k0) + k1)`, `u = ((h & 0x7FFFFFFF) + 0.5) / 2^31`. Small u, where the largest
    g come from, keeps its full resolution in fp32.

    `seeds` and `output_indices` are [N] int64, `token_ids` [C] or [N, C].
    """
    golden = _as_int64(0x9E3779B97F4A7C15)
    key = _mix64(_mix64(seeds) + output_indices * golden)
    low, high = _as_int32(key & _MASK_32), _as_int32(_shift_right_64(key, 32))
    h = token_ids.to(torch.int32) * _signed_32(0x9E3779B1) + low[:, None]
    h = _mix32(_mix32(h).add_(high[:, None]))
    u = h.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right_64(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right_64(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _shift_right_64(x, 31)


def _mix32(x: Tensor) -> Tensor:
    """Changes `x`."""
    x.bitwise_xor_(_shift_right_32(x, 16)).mul_(_signed_32(0x7FEB352D))
    x.bitwise_xor_(_shift_right_32(x, 15)).mul_(_signed_32(0x846CA68B))
    return x.bitwise_xor_(_shift_right_32(x, 16))


def _shift_right_64(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _shift_right_32(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _as_int64(unsigned: int) -> int:
    """The int64 with the same bits: integers of any size wrap."""
    return (unsigned + (1 << 63)) % (1 << 64) - (1 << 63)


def _signed_32(unsigned: int) -> int:
    return (unsigned ^ _INT32_SIGN) - _INT32_SIGN


def _as_int32(x: Tensor) -> Tensor:
    """int32 tensor with the bits of x in [0, 2^32)."""
    return ((x ^ _INT32_SIGN) - _INT32_SIGN).to(torch.int32)


def wrap_seed(seed: int) -> int:
    """A seed of any size as the int64 that `gumbel_noise` takes."""
    return _as_int64(seed)
