"""Drives a ModelRunner by hand: the smallest scheduler that can be, for tests of the runtime on CPU and CUDA."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from pagedcore.core.step import AdmittedRow, PendingStep, StepPlan, StepResult
from pagedcore.runtime.model_runner import ModelRunner
from pagedcore.sampling_params import SamplingParams
from support.tiny_model import TinyModel

GREEDY = SamplingParams(temperature=0.0)

ATTENTION_BACKEND = "auto"
CAPTURES_GRAPHS = False
KV_CACHE_DTYPE: torch.dtype | None = None
"""What `make_runner` makes; tests of other back-ends and caches set them."""


def make_runner(
    model: TinyModel, *, num_blocks: int = 200, block_size: int = 8, max_num_seqs: int = 8, max_model_len: int = 512
) -> ModelRunner:
    runner = ModelRunner(
        model,
        model.layout,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        dtype=model.embedding.dtype,
        device=model.embedding.device,
        kv_cache_dtype=KV_CACHE_DTYPE,
        attention_backend=ATTENTION_BACKEND,
    )
    if CAPTURES_GRAPHS:
        runner.capture_graphs(max_num_tokens=2048)
    return runner


@dataclass
class Sequence:
    """One request as the driver sees it."""

    row: int
    tokens: list[int]
    num_prompt_tokens: int
    blocks: list[int]
    num_computed: int = 0
    extra: dict[str, object] = field(default_factory=dict)
    params: SamplingParams = GREEDY
    num_borrowed: int = 0
    """Blocks at the table's start that another sequence has computed and owns."""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def admitted(self) -> AdmittedRow:
        return AdmittedRow(
            row=self.row,
            request_id=f"row-{self.row}",
            token_ids=list(self.tokens),
            num_prompt_tokens=self.num_prompt_tokens,
            block_ids=list(self.blocks),
            params=self.params,
            **self.extra,  # type: ignore[arg-type]
        )


class Driver:
    """Plans steps for a few sequences; blocks are handed out in a scattered order."""

    def __init__(self, runner: ModelRunner, *, num_blocks: int = 200, block_size: int = 8, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free_blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.results: list[StepResult] = []
        self._step_ids = itertools.count()
        self._admitted: list[AdmittedRow] = []
        self._released: list[int] = []

    def add(self, row: int, prompt: list[int], params: SamplingParams = GREEDY, **extra: object) -> Sequence:
        sequence = Sequence(row, list(prompt), len(prompt), self._take_blocks(len(prompt)), extra=extra, params=params)
        self._admitted.append(sequence.admitted())
        return sequence

    def add_behind(self, first: Sequence, num_blocks: int, row: int, prompt: list[int]) -> Sequence:
        """A sequence that begins with the computed blocks of another, as with a prefix cache."""
        num_tokens = num_blocks * self.block_size
        assert prompt[:num_tokens] == first.tokens[:num_tokens] and num_tokens <= first.num_computed
        blocks = first.blocks[:num_blocks] + self._take_blocks(len(prompt) - num_tokens)
        sequence = Sequence(row, list(prompt), len(prompt), blocks, num_computed=num_tokens, num_borrowed=num_blocks)
        self._admitted.append(sequence.admitted())
        return sequence

    def release(self, sequence: Sequence) -> None:
        self._released.append(sequence.row)
        self.free_blocks.extend(sequence.blocks[sequence.num_borrowed :])
        sequence.blocks, sequence.num_computed = [], 0

    def resume(self, sequence: Sequence, row: int) -> None:
        sequence.row = row
        sequence.blocks = self._take_blocks(len(sequence.tokens))
        self._admitted.append(sequence.admitted())

    def submit(self, work: list[tuple[Sequence, int]], *, num_unknown: int = 0) -> PendingStep:
        """Compute the next tokens of each sequence; `num_unknown` of them are still on the device."""
        new_blocks = [(sequence.row, blocks) for sequence, count in work if (blocks := self._grow(sequence, count))]
        plan = StepPlan(
            step_id=next(self._step_ids),
            rows=[sequence.row for sequence, _ in work],
            num_tokens=[count for _, count in work],
            start_positions=[sequence.num_computed for sequence, _ in work],
            samples=[sequence.num_computed + count == len(sequence.tokens) + num_unknown for sequence, count in work],
            admitted=self._admitted,
            released_rows=self._released,
            new_blocks=new_blocks,
            total_num_tokens=sum(count for _, count in work),
        )
        self._admitted, self._released = [], []
        for sequence, count in work:
            sequence.num_computed += count
        return self.runner.submit(plan)

    def step(self, work: list[tuple[Sequence, int]]) -> StepResult:
        sampling = [sequence for sequence, count in work if sequence.num_computed + count == len(sequence.tokens)]
        result = self.submit(work).result()
        for sequence, token in zip(sampling, result.sampled_token_ids, strict=True):
            sequence.tokens.append(token)
        self.results.append(result)
        return result

    def run(self, sequences: list[Sequence], num_tokens: int, *, chunk: int = 10_000) -> list[list[int]]:
        """Step all of them until each has `num_tokens` outputs."""
        while unfinished := [s for s in sequences if len(s.output) < num_tokens]:
            self.step([(s, min(chunk, len(s.tokens) - s.num_computed)) for s in unfinished])
        return [s.output for s in sequences]

    def _grow(self, sequence: Sequence, count: int) -> list[int]:
        needed = -(-(sequence.num_computed + count) // self.block_size) - len(sequence.blocks)
        blocks = [self.free_blocks.pop(0) for _ in range(max(0, needed))]
        sequence.blocks.extend(blocks)
        return blocks

    def _take_blocks(self, num_tokens: int) -> list[int]:
        return [self.free_blocks.pop(0) for _ in range(-(-num_tokens // self.block_size))]


def prompts(*lengths: int, vocab_size: int = 61) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def generate_alone(model: TinyModel, prompt: list[int], num_tokens: int, params: SamplingParams = GREEDY, **extra: object) -> list[int]:
    driver = Driver(make_runner(model))
    return driver.run([driver.add(0, prompt, params, **extra)], num_tokens)[0]
