"""Masks of grammars in the sampler, and the op that applies them."""

from __future__ import annotations

import math

import pytest
import torch

from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.sampler import STATUS_ALL_MASKED, STATUS_OK, Sampler
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels import mask_tokens
from support.grammars import VOCAB_SIZE, ids_of, make_grammars, texts


def words(token_ids: list[int], width: int) -> list[int]:
    """Token ids as the bits of `width` signed 32-bit words."""
    unsigned = [sum(1 << (token % 32) for token in token_ids if token // 32 == word) for word in range(width)]
    return [word - (1 << 32) if word >> 31 else word for word in unsigned]


@pytest.mark.parametrize(("vocab_size", "width"), [(1, 1), (32, 1), (70, 3), (70, 2), (33, 4)])
def test_a_bit_that_is_not_set_masks_its_token(vocab_size: int, width: int) -> None:
    sets = [[0], [31, 32, 63, 69], list(range(vocab_size)), []]
    allowed = [[token for token in tokens if token < min(vocab_size, 32 * width)] for tokens in sets]
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    rows = [4, 0, 2, 5]
    for row, tokens in zip(rows, allowed, strict=True):
        expected[row, [token for token in range(vocab_size) if token not in tokens]] = -math.inf
    mask_tokens(logits, torch.tensor(rows), torch.tensor([words(tokens, width) for tokens in allowed], dtype=torch.int32))
    assert torch.equal(logits, expected)


def test_more_rows_than_one_pass_takes_are_masked() -> None:
    logits = torch.zeros(150, 40)
    mask_tokens(logits, torch.arange(150), torch.tensor([words([index % 40], 2) for index in range(150)], dtype=torch.int32))
    assert logits.argmax(dim=-1).tolist() == [index % 40 for index in range(150)]
    assert logits.isfinite().sum().item() == 150


def admitted(row: int, params: SamplingParams, output: list[int]) -> AdmittedRow:
    return AdmittedRow(row=row, request_id=str(row), token_ids=[0, *output], num_prompt_tokens=1, block_ids=[0], params=params)


def step(admissions: list[AdmittedRow], released: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[], admitted=admissions, released_rows=released)


def test_a_row_draws_what_its_grammar_allows_after_its_own_output_and_others_are_free() -> None:
    grammars = make_grammars()
    buffers = RowBuffers(max_num_seqs=4, max_model_len=64, block_size=8, device=torch.device("cpu"))
    sampler = Sampler(buffers, VOCAB_SIZE)
    sampler.follow_grammars(grammars)
    greedy = SamplingParams(temperature=0.0)
    held = greedy.replace(structured_outputs={"choice": ["kq", "kx"]})
    plan = step([admitted(0, greedy, []), admitted(2, held, ids_of("k")), admitted(3, held, [])])
    buffers.apply(plan)
    sampler.apply(plan)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 5] = 1.0
    samples = sampler.sample(logits, [3, 0, 2], [1, 1, 2])
    chosen = samples.token_ids.tolist()
    assert texts({chosen[0]}) == {"k"}
    assert chosen[1] == 5
    assert texts({chosen[2]}) <= {"q", "x"}
    assert samples.status.tolist() == [STATUS_OK] * 3
    assert not samples.batch.is_drawn_plainly, "a graph knows nothing of masks"
    assert samples.batch.grammar is not None
    samples.batch.grammar.advance(chosen)
    again = sampler.sample(logits, [3, 0, 2], [2, 2, 3])
    assert texts(set(again.token_ids.tolist()[:1])) <= {"q", "x"}
    assert sampler.sample(logits[:1], [0], [1]).batch.grammar is None


def test_two_sets_of_rows_that_take_turns_are_each_made_once() -> None:
    buffers = RowBuffers(max_num_seqs=4, max_model_len=64, block_size=8, device=torch.device("cpu"))
    sampler = Sampler(buffers, VOCAB_SIZE)
    greedy = SamplingParams(temperature=0.0)
    buffers.apply(step([admitted(row, greedy, []) for row in range(3)]))
    first, second = sampler.batch_of([0, 1]), sampler.batch_of([0])
    assert sampler.batch_of([0, 1]) is first
    assert sampler.batch_of([0]) is second
    sampler.batch_of([2])
    assert sampler.batch_of([0, 1]) is not first
    buffers.apply(step([], released=(2,)))
    assert sampler.batch_of([0]) is not second


def test_a_row_that_changes_hands_begins_anew_while_its_old_step_is_read() -> None:
    grammars = make_grammars()
    buffers = RowBuffers(max_num_seqs=1, max_model_len=64, block_size=8, device=torch.device("cpu"))
    sampler = Sampler(buffers, VOCAB_SIZE)
    sampler.follow_grammars(grammars)
    held = SamplingParams(temperature=0.0, structured_outputs={"choice": ["kq"]})  # type: ignore[arg-type]
    first = step([admitted(0, held, [])])
    buffers.apply(first)
    sampler.apply(first)
    old = sampler.sample(torch.zeros(1, VOCAB_SIZE), [0], [1])
    second = step([admitted(0, held, [])], released=(0,))
    buffers.apply(second)
    sampler.apply(second)
    assert old.batch.grammar is not None
    old.batch.grammar.advance(old.token_ids.tolist())
    new = sampler.sample(torch.zeros(1, VOCAB_SIZE), [0], [1])
    assert texts(set(new.token_ids.tolist())) == {"k"}


def test_a_grammar_that_fails_masks_every_token_and_says_why() -> None:
    buffers = RowBuffers(max_num_seqs=1, max_model_len=64, block_size=8, device=torch.device("cpu"))
    sampler = Sampler(buffers, VOCAB_SIZE)
    sampler.follow_grammars(make_grammars())
    held = SamplingParams(temperature=0.0, structured_outputs={"choice": ["kq"]})  # type: ignore[arg-type]
    plan = step([admitted(0, held, ids_of("q"))])
    buffers.apply(plan)
    sampler.apply(plan)
    samples = sampler.sample(torch.zeros(1, VOCAB_SIZE), [0], [2])
    assert samples.status.tolist() == [STATUS_ALL_MASKED]
    assert samples.batch.grammar is not None
    assert "every token is masked by its grammar" in samples.batch.grammar.errors()[0]
