"""The quality half of `pagedcore compare`: two loaded models, side by side over the same windows of one text."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedcore.commands.agreement import AgreementTally, score_positions
from pagedcore.commands.comparison import Agreement, TextScope
from pagedcore.commands.side import Side, shared_vocab_size
from pagedcore.commands.text_scorer import TextScorer
from pagedcore.models.decoder import Decoder
from pagedcore.models.progress import Progress
from pagedcore.runtime.build import load_decoder, resolve_kv_cache_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScores:
    """What scoring a text found out."""

    agreement: Agreement
    scope: TextScope
    weight_bytes_a: int
    weight_bytes_b: int


def score_text(a: Side, b: Side, token_ids: Sequence[int], window_tokens: int, progress: Progress) -> TextScores:
    """Load both models and score them in step. Both are in memory until this returns. Raises what `load_decoder` raises."""
    try:
        return _score(a, b, token_ids, window_tokens, progress)
    finally:
        _give_memory_back()


def _score(a: Side, b: Side, token_ids: Sequence[int], window_tokens: int, progress: Progress) -> TextScores:
    models = [_load(side, progress) for side in (a, b)]
    scorers = [_scorer(side, model, window_tokens) for side, model in zip((a, b), models, strict=True)]
    windows = list(_windows(token_ids, window_tokens))
    vocab_size = shared_vocab_size(a, b)
    agreement = _agreement(scorers, windows, vocab_size, progress)
    return TextScores(
        agreement=agreement,
        scope=TextScope(
            num_text_tokens=len(token_ids),
            num_windows=len(windows),
            window_tokens=window_tokens,
            vocab_size=vocab_size,
            num_left_out_logits=max(a.vocab_size, b.vocab_size) - vocab_size,
        ),
        weight_bytes_a=models[0].num_weight_bytes,
        weight_bytes_b=models[1].num_weight_bytes,
    )


def _agreement(scorers: Sequence[TextScorer], windows: Sequence[Sequence[int]], vocab_size: int, progress: Progress) -> Agreement:
    import torch

    tally, done, total = AgreementTally(), 0, sum(len(window) - 1 for window in windows)
    device = scorers[0].device
    for window in windows:
        targets = torch.tensor(window[1:], device=device)
        first = 0
        for chunks in zip(*(scorer.logits(window[:-1]) for scorer in scorers), strict=True):
            logits_a, logits_b = (chunk[:, :vocab_size].to(device) for chunk in chunks)
            last = first + len(logits_a)
            tally.add(score_positions(logits_a, logits_b, targets[first:last]))
            done, first = done + last - first, last
            progress("Scoring", done, total)
    return tally.result()


def _windows(token_ids: Sequence[int], window_tokens: int) -> Iterator[Sequence[int]]:
    """Pieces of at most this many tokens; a last piece of one token has nothing to score."""
    for first in range(0, len(token_ids), window_tokens):
        window = token_ids[first : first + window_tokens]
        if len(window) > 1:
            yield window


def _load(side: Side, progress: Progress) -> Decoder:
    return load_decoder(side.config, side.model_dir, progress=lambda done, total: progress(f"Loading {side.label}", done, total))


def _scorer(side: Side, model: Decoder, window_tokens: int) -> TextScorer:
    """Keys and values are stored as the side's engine stores them."""
    cache_dtype = resolve_kv_cache_dtype(side.config.kv_cache_dtype, model.dtype)
    return TextScorer(model, max_tokens=window_tokens, block_size=side.config.block_size, kv_cache_dtype=cache_dtype)


def _give_memory_back() -> None:
    """The engines that come next size their pools by what is free."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used
