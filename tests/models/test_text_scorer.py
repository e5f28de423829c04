"""The logits of a whole text, by the engine's own passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagedcore.commands.text_scorer import TextScorer
from pagedcore.errors import ConfigError
from pagedcore.models.decoder import Decoder
from support.tiny_models import CLASSES, load, make_checkpoint, prompt_ids, reference_logits, run

TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}


def score(model: Decoder, token_ids: Tensor, *, chunk_tokens: int = 16, block_size: int = 8) -> Tensor:
    scorer = TextScorer(model, max_tokens=len(token_ids), block_size=block_size, chunk_tokens=chunk_tokens)
    return torch.cat(list(scorer.logits(token_ids.tolist())))


@pytest.mark.parametrize("family", CLASSES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    token_ids = prompt_ids(43)
    torch.testing.assert_close(score(load(tmp_path), token_ids), reference_logits(checkpoint.reference, token_ids), **TOLERANCES)


def test_a_sliding_window_reaches_over_chunks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "mistral", sliding_window=11)
    token_ids = prompt_ids(43)
    torch.testing.assert_close(score(load(tmp_path), token_ids), reference_logits(checkpoint.reference, token_ids), **TOLERANCES)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 14, 42, 43, 256])
def test_chunks_do_not_change_logits_beyond_rounding(tmp_path: Path, chunk_tokens: int) -> None:
    make_checkpoint(tmp_path, "llama")
    model, token_ids = load(tmp_path), prompt_ids(43)
    torch.testing.assert_close(score(model, token_ids, chunk_tokens=chunk_tokens), run(model, token_ids), **TOLERANCES)


def test_chunks_come_in_order_and_the_last_one_is_the_rest(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    scorer = TextScorer(load(tmp_path), max_tokens=43, block_size=8, chunk_tokens=20)
    assert [tuple(chunk.shape) for chunk in scorer.logits(prompt_ids(43).tolist())] == [(20, 128), (20, 128), (3, 128)]


def test_a_sequence_sees_nothing_of_the_one_before(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model = load(tmp_path)
    scorer = TextScorer(model, max_tokens=43, block_size=8, chunk_tokens=16)
    list(scorer.logits(prompt_ids(43).tolist()))
    second = torch.cat(list(scorer.logits(prompt_ids(29).tolist())))
    assert torch.equal(second, score(model, prompt_ids(29)))


def test_what_the_memory_held_before_is_never_seen(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model, token_ids = load(tmp_path), prompt_ids(43)
    scorer = TextScorer(model, max_tokens=43, block_size=8, chunk_tokens=6)
    scorer._cache.data.fill_(torch.nan)
    torch.testing.assert_close(torch.cat(list(scorer.logits(token_ids.tolist()))), run(model, token_ids), **TOLERANCES)


def test_more_tokens_than_the_cache_holds_are_a_mistake(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    scorer = TextScorer(load(tmp_path), max_tokens=8, block_size=8)
    with pytest.raises(AssertionError, match="9 tokens"):
        next(scorer.logits([1] * 9))


def test_a_back_end_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="attention_backend is 'magic'"):
        TextScorer(load(tmp_path), max_tokens=8, attention_backend="magic")
