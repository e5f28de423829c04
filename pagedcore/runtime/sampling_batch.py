"""The sampling settings of a set of rows as device tensors: built when the set changes, used step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.core.step import AdmittedRow
from pagedcore.grammar.rows import MatchedRows
from pagedcore.runtime.logprobs import MAX_ELEMENTS
from pagedcore.runtime.transfer import to_device
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels import wrap_seed

SMALL_CANDIDATES = 64
MAX_CANDIDATES = 1024
"""Widths of the ordered candidate list. A row's width depends on its own settings alone, so batch-mates cannot change its draw."""


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows that draw in the same way, few enough that one pass over their logits is bounded."""

    rows: Tensor  # [R] int64, indices in the batch
    num_candidates: int
    """Likeliest tokens to order; 0 draws among all tokens without ordering."""
    may_overflow: bool
    """top_p without top_k: the kept set may be larger than the candidates."""


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Sparse additions to the logits: row, token id, and what the caller needs to know the value."""

    rows: Tensor  # [E] int64
    token_ids: Tensor  # [E] int64
    values: Tensor  # [E] fp32


@dataclass(frozen=True, slots=True)
class BadWords:
    """W words; the last token of a word is masked where the tokens before it end the row."""

    rows: Tensor  # [W] int64
    last_ids: Tensor  # [W] int64
    prefixes: Tensor  # [W, M] int64, right-aligned
    prefix_lens: Tensor  # [W] int64


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Which rows of a step want log probabilities, and how many alternatives each."""

    rows: Tensor  # [R] int64
    indices: list[int]
    num_top: list[int]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Settings of N rows. Absent work is None or an empty list, and costs nothing."""

    buffer_rows: Tensor  # [N] int64, rows of the device buffers
    floats: dict[str, Tensor]
    """Field of SamplingParams -> [N] fp32."""
    seeds: Tensor  # [N] int64
    top_k: Tensor  # [N] int64
    min_tokens: Tensor  # [N] int64
    prompt_lens: Tensor  # [N] int64
    penalty_chunks: list[Tensor]
    bias: TokenEntries | None
    stop_masks: TokenEntries | None
    bad_words: BadWords | None
    grammar: MatchedRows | None
    draws: list[DrawGroup]
    logprobs: LogprobRows | None

    @property
    def changes_logits(self) -> bool:
        return bool(self.penalty_chunks) or any(part is not None for part in (self.bias, self.stop_masks, self.bad_words, self.grammar))

    @property
    def is_plain_greedy(self) -> bool:
        return not self.changes_logits and not self.draws

    @property
    def is_drawn_plainly(self) -> bool:
        """Whether a token follows from logits as they are: temperature, top_k, top_p, min_p and seed say all."""
        return not self.changes_logits and self.logprobs is None


FLOAT_FIELDS = ("temperature", "min_p", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def build_sampling_batch(
    requests: Sequence[AdmittedRow], vocab_size: int, device: torch.device, grammar: MatchedRows | None = None
) -> SamplingBatch:
    """Settings of `requests`, in this order. Copies them to the device."""
    params = [request.params for request in requests]
    floats = to_device([getattr(p, name) for name in FLOAT_FIELDS for p in params], torch.float32, device).view(-1, len(params))
    columns = (
        [request.row for request in requests],
        [wrap_seed(p.seed or 0) for p in params],
        [min(p.top_k, vocab_size) for p in params],
        [p.min_tokens for p in params],
        [request.num_prompt_tokens for request in requests],
    )
    ints = to_device([value for column in columns for value in column], torch.int64, device).view(-1, len(params))
    return SamplingBatch(
        buffer_rows=ints[0],
        floats=dict(zip(FLOAT_FIELDS, floats, strict=True)),
        seeds=ints[1],
        top_k=ints[2],
        min_tokens=ints[3],
        prompt_lens=ints[4],
        penalty_chunks=_chunks(_where(params, lambda p: p.has_penalties), vocab_size, device),
        bias=_bias(params, vocab_size, device),
        stop_masks=_stop_masks(requests, vocab_size, device),
        bad_words=_bad_words(requests, vocab_size, device),
        grammar=grammar,
        draws=_draw_groups(params, vocab_size, device),
        logprobs=_logprob_rows(params, device),
    )


def _where(params: Sequence[SamplingParams], wanted: Callable[[SamplingParams], bool]) -> list[int]:
    return [index for index, p in enumerate(params) if wanted(p)]


def _chunks(rows: list[int], vocab_size: int, device: torch.device) -> list[Tensor]:
    step = max(1, MAX_ELEMENTS // vocab_size)
    return [to_device(rows[first : first + step], torch.int64, device) for first in range(0, len(rows), step)]


def _entries(triples: list[tuple[int, int, float]], vocab_size: int, device: torch.device) -> TokenEntries | None:
    """Ids beyond the vocabulary cannot be drawn and need no entry."""
    triples = [entry for entry in triples if entry[1] < vocab_size]
    if not triples:
        return None
    rows, token_ids, values = zip(*triples, strict=True)
    ids = to_device(rows + token_ids, torch.int64, device).view(2, -1)
    return TokenEntries(ids[0], ids[1], to_device(values, torch.float32, device))


def _bias(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> TokenEntries | None:
    return _entries([(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()], vocab_size, device)


def _stop_masks(requests: Sequence[AdmittedRow], vocab_size: int, device: torch.device) -> TokenEntries | None:
    return _entries(
        [(row, token, float("-inf")) for row, r in enumerate(requests) if r.params.min_tokens for token in sorted(r.stop_token_ids)],
        vocab_size,
        device,
    )


def _bad_words(requests: Sequence[AdmittedRow], vocab_size: int, device: torch.device) -> BadWords | None:
    words = [(row, word) for row, r in enumerate(requests) for word in r.bad_words_token_ids if word and max(word) < vocab_size]
    if not words:
        return None
    width = max(1, max(len(word) for _, word in words) - 1)
    prefixes = [token for _, word in words for token in (0,) * (width - len(word) + 1) + word[:-1]]
    columns = [row for row, _ in words] + [word[-1] for _, word in words] + [len(word) - 1 for _, word in words]
    rows, last_ids, prefix_lens = to_device(columns, torch.int64, device).view(3, -1)
    return BadWords(rows, last_ids, to_device(prefixes, torch.int64, device).view(-1, width), prefix_lens)


def _draw_groups(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> list[DrawGroup]:
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for row in _where(params, lambda p: not p.is_greedy and p.top_k != 1):
        by_kind.setdefault(_draw_kind(params[row], vocab_size, device), []).append(row)
    return [DrawGroup(rows, *kind) for kind, members in by_kind.items() for rows in _chunks(members, vocab_size, device)]


def _draw_kind(p: SamplingParams, vocab_size: int, device: torch.device) -> tuple[int, bool]:
    """Candidates to order, and whether the kept set may be larger. Looking whether it is makes the host wait: not on CUDA."""
    if p.top_k == 0 and p.top_p == 1.0:
        return 0, False
    if p.top_k == 0:
        return (vocab_size, False) if device.type == "cuda" or vocab_size <= MAX_CANDIDATES else (MAX_CANDIDATES, True)
    width = SMALL_CANDIDATES if p.top_k <= SMALL_CANDIDATES else MAX_CANDIDATES if p.top_k <= MAX_CANDIDATES else vocab_size
    return min(width, vocab_size), False


def _logprob_rows(params: Sequence[SamplingParams], device: torch.device) -> LogprobRows | None:
    indices = _where(params, lambda p: p.logprobs is not None)
    if not indices:
        return None
    return LogprobRows(to_device(indices, torch.int64, device), indices, [params[index].logprobs or 0 for index in indices])
