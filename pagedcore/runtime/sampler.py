"""From logits to tokens: all of `SamplingParams`, on the device, only the work that some row needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.core.step import StepPlan
from pagedcore.grammar.grammars import Grammars
from pagedcore.grammar.rows import RowMatchers
from pagedcore.runtime.logprobs import TokenLogprobs, token_logprobs
from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.sampling_batch import BadWords, DrawGroup, SamplingBatch, build_sampling_batch
from pagedcore.runtime.transfer import to_device, words_to_device
from pagedcore_kernels import add_to_logits, apply_penalties, gumbel_noise, keep_candidates, mask_tokens, order_candidates
from pagedcore_kernels.dispatch import uses_triton

STATUS_OK = 0
STATUS_NOT_FINITE = 1
STATUS_ALL_MASKED = 2

STATUS_MESSAGES = {
    STATUS_NOT_FINITE: "The model gave NaN or infinite logits for this request.",
    STATUS_ALL_MASKED: "Every token is masked: bad_words, min_tokens, logit_bias and structured_outputs leave nothing to draw.",
}


@dataclass(frozen=True, slots=True)
class Samples:
    """N drawn tokens, on the device."""

    token_ids: Tensor  # [N] int64; of no meaning where the status is not STATUS_OK
    status: Tensor  # [N] int8
    positions: Tensor  # [N] int64, where each token goes in its row
    buffer_rows: Tensor  # [N] int64
    logprobs: TokenLogprobs | None
    """Of the rows `batch.logprobs` names."""
    batch: SamplingBatch


class Sampler:
    """Owns the sampling tensors of the last sets of rows, and the matchers of rows that follow a grammar; reads the tokens of `buffers`."""

    def __init__(self, buffers: RowBuffers, vocab_size: int) -> None:
        self._buffers = buffers
        self._vocab_size = vocab_size
        self._batches: dict[tuple[tuple[int, ...], int], SamplingBatch] = {}
        """The last two: beside rows that are never planned ahead, steps with and without them take turns."""
        self._matchers: RowMatchers | None = None

    def follow_grammars(self, grammars: Grammars) -> None:
        """Serve rows with `structured_outputs`, too."""
        self._matchers = RowMatchers(grammars)

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's released and admitted rows."""
        if self._matchers is not None:
            self._matchers.apply(plan)

    def sample(self, logits: Tensor, rows: Sequence[int], seq_lens: Sequence[int]) -> Samples:
        """Draw one token a row from `logits` [N, V], which stay as they are. `seq_lens[i]` counts the tokens known of row i."""
        batch = self.batch_of(rows)
        lens = to_device(seq_lens, torch.int64, self._buffers.device)
        if batch.is_plain_greedy:
            best, token_ids = logits.max(dim=-1)
            status = (~best.isfinite()).to(torch.int8)
        else:
            token_ids, status = self._draw_all(logits, batch, lens, max(seq_lens))
        logprobs = None
        if batch.logprobs is not None:
            wanted = batch.logprobs.rows
            logprobs = token_logprobs(logits.index_select(0, wanted), token_ids.index_select(0, wanted), max(batch.logprobs.num_top))
        return Samples(token_ids, status, lens, batch.buffer_rows, logprobs, batch)

    def batch_of(self, rows: Sequence[int]) -> SamplingBatch:
        """The settings of these rows; made anew where rows or their requests have changed."""
        key = (tuple(rows), self._buffers.generation)
        if key not in self._batches:
            if len(self._batches) > 1:
                del self._batches[next(iter(self._batches))]
            requests, device = [self._buffers[row].request for row in rows], self._buffers.device
            grammar = None if self._matchers is None else self._matchers.among(rows)
            self._batches[key] = build_sampling_batch(requests, self._vocab_size, device, grammar)
        return self._batches[key]

    def _draw_all(self, logits: Tensor, batch: SamplingBatch, lens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        is_finite = logits.amax(dim=-1).isfinite()
        output_indices = lens - batch.prompt_lens
        if batch.changes_logits:
            logits = logits.to(torch.float32, copy=True)
            self._change_logits(logits, batch, lens, output_indices, longest)
        draw_rows = _draw_by_kernel if uses_triton(logits) else _draw_in_groups
        token_ids, status = draw_rows(logits, batch, output_indices)
        return token_ids, status.masked_fill_(~is_finite, STATUS_NOT_FINITE)

    def _change_logits(self, logits: Tensor, batch: SamplingBatch, lens: Tensor, output_indices: Tensor, longest: int) -> None:
        for rows in batch.penalty_chunks:
            part = logits.index_select(0, rows)
            history = self._buffers.token_ids[:, :longest].index_select(0, batch.buffer_rows[rows])
            penalties = {name: batch.floats[f"{name}_penalty"][rows] for name in ("repetition", "presence", "frequency")}
            apply_penalties(part, history, batch.prompt_lens[rows], lens[rows], **penalties)
            logits.index_copy_(0, rows, part)
        if batch.bias is not None:
            add_to_logits(logits, batch.bias.rows, batch.bias.token_ids, batch.bias.values)
        if batch.bad_words is not None:
            self._mask_bad_words(logits, batch.bad_words, batch, lens)
        if (masks := batch.stop_masks) is not None:
            is_early = output_indices[masks.rows] < batch.min_tokens[masks.rows]
            add_to_logits(logits, masks.rows, masks.token_ids, masks.values.where(is_early, 0.0))
        if (grammar := batch.grammar) is not None:
            rows = to_device(grammar.indices, torch.int64, logits.device)
            mask_tokens(logits, rows, words_to_device(grammar.masks(), len(rows), logits.device))

    def _mask_bad_words(self, logits: Tensor, words: BadWords, batch: SamplingBatch, lens: Tensor) -> None:
        """The whole row counts, so a word that began in the prompt is not finished either."""
        width = words.prefixes.shape[1]
        columns = torch.arange(width, device=lens.device)
        positions = (lens[words.rows, None] - width + columns).clamp_(min=0)
        tail = self._buffers.token_ids[batch.buffer_rows[words.rows, None], positions]
        is_free = columns < width - words.prefix_lens[:, None]
        matches = ((tail == words.prefixes) | is_free).all(dim=1) & (lens[words.rows] >= words.prefix_lens)
        add_to_logits(logits, words.rows, words.last_ids, torch.where(matches, -math.inf, 0.0))


def _draw_by_kernel(logits: Tensor, batch: SamplingBatch, output_indices: Tensor) -> tuple[Tensor, Tensor]:
    """As a decode graph draws, without sorting the vocabulary: [N, V] -> [N] token ids and statuses."""
    from pagedcore_kernels.triton_ops.sampling import sample_tokens

    drawn = sample_tokens(
        logits,
        temperature=batch.floats["temperature"],
        top_k=batch.top_k,
        top_p=batch.floats["top_p"],
        min_p=batch.floats["min_p"],
        seeds=batch.seeds,
        output_indices=output_indices,
        is_masked=True,
    )
    return drawn.token_ids, drawn.status


def _draw_in_groups(logits: Tensor, batch: SamplingBatch, output_indices: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch, by the work that rows need."""
    best, token_ids = logits.max(dim=-1)
    for group in batch.draws:
        drawn = _draw(logits.index_select(0, group.rows), group, batch, output_indices)
        token_ids.index_copy_(0, group.rows, drawn)
    return token_ids, (best == -math.inf).to(torch.int8) * STATUS_ALL_MASKED


def _draw(logits: Tensor, group: DrawGroup, batch: SamplingBatch, output_indices: Tensor) -> Tensor:
    """[R, V] -> [R] token ids."""
    rows = group.rows
    logits = logits.float() / batch.floats["temperature"][rows, None]
    settings = _DrawSettings(
        batch.floats["min_p"][rows], batch.top_k[rows], batch.floats["top_p"][rows], batch.seeds[rows], output_indices[rows]
    )
    if group.num_candidates == 0:
        return settings.draw_among_all(logits)
    if group.may_overflow:
        return settings.draw_among_some(logits, group.num_candidates)
    return settings.draw_ordered(*order_candidates(logits, group.num_candidates), None)[0]


@dataclass(frozen=True, slots=True)
class _DrawSettings:
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    output_indices: Tensor

    def __getitem__(self, rows: Tensor) -> _DrawSettings:
        return _DrawSettings(self.min_p[rows], self.top_k[rows], self.top_p[rows], self.seeds[rows], self.output_indices[rows])

    def draw_among_all(self, logits: Tensor) -> Tensor:
        """Without an order: min_p alone. Changes `logits`."""
        vocabulary = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
        noisy = self._without_unlikely(logits).add_(gumbel_noise(self.seeds, self.output_indices, vocabulary))
        return noisy.max(dim=-1).indices

    def draw_among_some(self, logits: Tensor, num_candidates: int) -> Tensor:
        """top_p over the likeliest tokens; rows whose kept set is larger are ordered in full. Makes the host wait."""
        values, ids = order_candidates(logits, num_candidates)
        log_total = torch.logsumexp(self._without_unlikely(logits), dim=-1)
        token_ids, is_complete = self.draw_ordered(values, ids, log_total)
        larger = (~is_complete).nonzero().view(-1)
        if len(larger):
            values, ids = order_candidates(logits.index_select(0, larger), logits.shape[1])
            token_ids.index_copy_(0, larger, self[larger].draw_ordered(values, ids, log_total[larger])[0])
        return token_ids

    def draw_ordered(self, values: Tensor, ids: Tensor, log_total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Token ids [R], and whether the kept set ended within the candidates."""
        kept, covered = keep_candidates(values, min_p=self.min_p, top_k=self.top_k, top_p=self.top_p, log_total=log_total)
        noisy = values.masked_fill(~kept, -math.inf).add_(gumbel_noise(self.seeds, self.output_indices, ids))
        choice = noisy.max(dim=-1, keepdim=True).indices
        return ids.gather(1, choice).view(-1), (covered >= self.top_p) | ~kept[:, -1]

    def _without_unlikely(self, logits: Tensor) -> Tensor:
        """min_p. Changes `logits`."""
        floor = logits.amax(dim=-1, keepdim=True) + torch.log(self.min_p)[:, None]
        return logits.masked_fill_(logits < floor, -math.inf)
