"""What a ModelRunner promises, as functions of a device: run by the CPU tests and by the CUDA tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagedcore.sampling_params import SamplingParams
from support.runner_driver import GREEDY, Driver, Sequence, generate_alone, make_runner, prompts
from support.tiny_model import TinyModel

MIXED = (
    GREEDY,
    SamplingParams(seed=7, temperature=0.8),
    SamplingParams(seed=8, top_p=0.9),
    SamplingParams(seed=9, top_k=5, min_p=0.01),
    SamplingParams(seed=10, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(seed=11, logit_bias={3: 4.0, 5: -100.0}, logprobs=2),
)


def check_together_equals_alone(device: str) -> None:
    model = TinyModel(device=device)
    texts = prompts(9, 17, 64, 30, 1, 5)
    alone = [generate_alone(model, prompt, 12, params) for prompt, params in zip(texts, MIXED, strict=True)]
    driver = Driver(make_runner(model))
    sequences = [driver.add(row, prompt, params) for row, (prompt, params) in enumerate(zip(texts, MIXED, strict=True))]
    assert driver.run(sequences, 12) == alone


def check_chunks_equal_whole(device: str, chunk: int) -> None:
    model = TinyModel(device=device)
    texts = prompts(33, 70)
    driver = Driver(make_runner(model))
    params = SamplingParams(seed=3)
    sequences = [driver.add(row, prompt, params) for row, prompt in enumerate(texts)]
    assert driver.run(sequences, 8, chunk=chunk) == [generate_alone(model, prompt, 8, params) for prompt in texts]


def check_block_size_is_irrelevant(device: str, block_size: int) -> None:
    model = TinyModel(device=device)
    texts = prompts(40, 3)
    driver = Driver(make_runner(model, block_size=block_size, num_blocks=60), num_blocks=60, block_size=block_size)
    sequences = [driver.add(row, prompt) for row, prompt in enumerate(texts)]
    assert driver.run(sequences, 40) == [generate_alone(model, prompt, 40) for prompt in texts]


def check_resume_equals_uninterrupted(device: str) -> None:
    model = TinyModel(device=device)
    params = SamplingParams(seed=5, repetition_penalty=1.2, frequency_penalty=0.3)
    first, other = prompts(21, 12)
    driver = Driver(make_runner(model))
    sequence = driver.add(1, first, params)
    driver.run([sequence], 6)
    driver.release(sequence)
    neighbour = driver.add(1, other, params)
    driver.run([neighbour], 4)
    driver.resume(sequence, row=3)
    assert driver.run([sequence, neighbour], 15) == [generate_alone(model, first, 15, params), generate_alone(model, other, 15, params)]


def check_submit_ahead_equals_step_by_step(device: str) -> None:
    """Three steps are in flight before the first result is read."""
    model = TinyModel(device=device)
    texts = prompts(20, 8)
    params = [SamplingParams(seed=1, presence_penalty=0.5), GREEDY]
    driver = Driver(make_runner(model))
    sequences = [driver.add(row, prompt, p) for row, (prompt, p) in enumerate(zip(texts, params, strict=True))]
    pending = [driver.submit([(s, len(s.tokens)) for s in sequences])]
    pending += [driver.submit([(s, 1) for s in sequences], num_unknown=ahead) for ahead in range(1, 20)]
    outputs = [list(tokens) for tokens in zip(*(step.result().sampled_token_ids for step in pending), strict=True)]
    assert outputs == [generate_alone(model, prompt, 20, p) for prompt, p in zip(texts, params, strict=True)]


def check_poisoned_memory_never_leaks(device: str) -> None:
    """All KV memory starts as NaN; a row whose own logits are NaN fails alone, and its blocks harm nobody afterwards."""
    model = TinyModel(device=device)
    good, reference = prompts(27, 11)
    expected = [generate_alone(model, good, 10), generate_alone(model, reference, 10)]
    runner = make_runner(model, num_blocks=12)
    runner._cache.data[:, :12] = float("nan")
    driver = Driver(runner, num_blocks=12)
    sick = driver.add(0, [60] * 30)
    healthy = driver.add(1, good)
    model.poison(60)
    result = driver.step([(sick, 30), (healthy, 27)])
    model.poison(None)
    assert set(result.row_errors) == {0}
    assert "NaN" in result.row_errors[0]
    for block in sick.blocks:
        runner._cache.data[:, block] = float("nan")
    driver.release(sick)
    driver.free_blocks.sort(key=lambda block: block not in sick.blocks)
    second = driver.add(0, reference)
    assert driver.run([healthy, second], 10) == expected


def check_rows_that_share_a_prefix_equal_alone(device: str) -> None:
    """Rows join and leave, one shares nothing, the prefix shrinks and grows; all KV memory starts as NaN. Graphs read it once."""
    model = TinyModel(device=device)
    stem, *tails = prompts(48, 12, 17, 3, 30, 9, 2)
    runner = make_runner(model)
    runner._cache.data.fill_(float("nan"))
    driver = Driver(runner)

    def alone(sequence: Sequence) -> list[int]:
        return generate_alone(model, sequence.tokens[: sequence.num_prompt_tokens], len(sequence.output))

    def run(sequences: list[Sequence], num_tokens: int, num_shared: int) -> None:
        """All have been prefilled, and most begin with the same `num_shared` tokens."""
        for _ in range(num_tokens):
            driver.step([(sequence, 1) for sequence in sequences])
        assert [sequence.output for sequence in sequences] == [alone(sequence) for sequence in sequences]
        if runner._graphs is not None:
            assert runner._graphs._is_shared
            assert max(runner._graphs._prefix.lens[: len(sequences)].tolist()) == num_shared

    first = driver.add(0, stem + tails[0])
    driver.step([(first, len(first.tokens))])
    others = [driver.add_behind(first, 6, row, stem + tails[row]) for row in (1, 2)]
    stranger = driver.add(3, tails[3])
    driver.step([(sequence, len(sequence.tokens) - sequence.num_computed) for sequence in (*others, stranger)])
    run([first, stranger, *others], 3, 48)
    driver.release(others[0])
    newcomer = driver.add_behind(first, 2, 1, stem[:16] + tails[4])
    driver.step([(newcomer, len(newcomer.tokens) - newcomer.num_computed)])
    run([newcomer, others[1], first], 2, 48)
    run([newcomer, first], 2, 16)
    for sequence in (newcomer, others[1], stranger):
        driver.release(sequence)
    grown = [driver.add_behind(first, 8, row, first.tokens[:64] + tails[row]) for row in (5, 1)]
    driver.step([(sequence, len(sequence.tokens) - sequence.num_computed) for sequence in grown])
    run([grown[0], first, grown[1]], 3, 64)


def check_passes_keep_their_logits(device: str) -> None:
    """A row that wants prompt log probabilities runs in a pass of its own, before the others of its step."""
    model = TinyModel(device=device)
    first, second = prompts(5, 9)
    driver = Driver(make_runner(model))
    params = GREEDY.replace(prompt_logprobs=1)
    sequences = [driver.add(0, first, params), driver.add(1, second)]
    assert driver.run(sequences, 3) == [generate_alone(model, first, 3, params), generate_alone(model, second, 3)]


def check_prompt_logprobs(device: str) -> None:
    """Equal to a dense log softmax, in any chunks, with more prompt tokens than one pass takes."""
    model = TinyModel(device=device)
    (prompt,) = prompts(400)
    reference = _prompt_logprobs(model, prompt, chunk=1)
    for chunk in (400, 90):
        actual = _prompt_logprobs(model, prompt, chunk=chunk)
        assert len(actual) == len(prompt) - 1
        for got, expected, token in zip(actual, reference, prompt[1:], strict=True):
            assert token in got and len(got) in (3, 4)
            assert got.keys() == expected.keys()
            assert all(abs(got[t].logprob - expected[t].logprob) < 1e-3 and got[t].rank == expected[t].rank for t in got)


def _prompt_logprobs(model: TinyModel, prompt: list[int], chunk: int):
    driver = Driver(make_runner(model))
    sequence = driver.add(2, prompt, GREEDY.replace(prompt_logprobs=3))
    bystander = driver.add(4, prompt[:50])
    driver.step([(sequence, min(chunk, len(prompt))), (bystander, 50)])
    driver.run([sequence], 3, chunk=chunk)
    return [entry for result in driver.results for entry in result.prompt_logprobs.get(2, [])]


TOKEN_CHECKS: dict[str, Callable[[str], None]] = {
    "together": check_together_equals_alone,
    "chunks": partial(check_chunks_equal_whole, chunk=7),
    "block size": partial(check_block_size_is_irrelevant, block_size=64),
    "resume": check_resume_equals_uninterrupted,
    "ahead": check_submit_ahead_equals_step_by_step,
    "poison": check_poisoned_memory_never_leaks,
    "shared prefix": check_rows_that_share_a_prefix_equal_alone,
}
"""Those that compare tokens, which hold where keys and values are rounded to few bits."""
