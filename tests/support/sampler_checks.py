"""Builders and device-independent checks of the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.sampler import Sampler, Samples
from pagedcore.sampling_params import SamplingParams

SEEDED = SamplingParams(seed=1)


def sample(
    logits: Sequence[Sequence[float]] | torch.Tensor,
    params: Sequence[SamplingParams],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    stop_ids: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
    device: str = "cpu",
) -> Samples:
    """One draw a row; each row has a prompt (default: token 0) and an output so far (default: none)."""
    logits = torch.as_tensor(logits, dtype=torch.float32, device=device) if not isinstance(logits, torch.Tensor) else logits.to(device)
    prompts = prompts or [[0]] * len(params)
    outputs = outputs or [[]] * len(params)
    buffers = RowBuffers(max_num_seqs=len(params) + 2, max_model_len=64, block_size=8, device=torch.device(device))
    rows = [len(params) + 1 - index for index in range(len(params))]
    admitted = [
        AdmittedRow(
            row=row,
            request_id=str(row),
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            block_ids=[0],
            params=p,
            stop_token_ids=stop_ids,
            bad_words_token_ids=bad_words,
        )
        for row, prompt, output, p in zip(rows, prompts, outputs, params, strict=True)
    ]
    buffers.apply(StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[], admitted=admitted))
    return Sampler(buffers, logits.shape[1]).sample(logits, rows, [len(row.token_ids) for row in admitted])


def tokens(*args: object, **kwargs: object) -> list[int]:
    return sample(*args, **kwargs).token_ids.tolist()  # type: ignore[arg-type]


def draws(logits: Sequence[float], params: SamplingParams, count: int = 400, **kwargs: object) -> list[int]:
    """`count` draws from one distribution, with seeds 0 ... count - 1."""
    rows = torch.tensor(logits, dtype=torch.float32).repeat(count, 1)
    return tokens(rows, [params.replace(seed=seed) for seed in range(count)], **kwargs)


def mixed_rows(vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, list[SamplingParams]]:
    """Rows with all kinds of settings, over logits with many ties."""
    logits = (torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4).round() / 2
    params = [
        SamplingParams(temperature=0.0),
        SEEDED,
        SamplingParams(seed=2, top_k=1),
        SamplingParams(seed=3, top_k=7),
        SamplingParams(seed=4, top_k=100, top_p=0.7),
        SamplingParams(seed=5, top_p=0.5),
        SamplingParams(seed=6, top_p=0.9999, temperature=3.0),
        SamplingParams(seed=7, min_p=0.2),
        SamplingParams(seed=8, repetition_penalty=1.5),
        SamplingParams(seed=9, presence_penalty=1.0, frequency_penalty=-1.0, top_k=2000),
        SamplingParams(temperature=0.0, logit_bias={3: 5.0}),
        SamplingParams(seed=10, temperature=0.3, min_p=0.05, top_k=30, top_p=0.9),
    ]
    return logits, params


def check_same_draws_on(device: str) -> None:
    """The integers behind the noise are the same everywhere, so a device draws what a CPU draws."""
    for vocab_size in (50, 5000):
        logits, params = mixed_rows(vocab_size)
        history = [[index % vocab_size, 4, 4] for index in range(12)]
        assert tokens(logits, params, outputs=history, device=device) == tokens(logits, params, outputs=history)
