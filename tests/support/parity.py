"""How two runs of one model may differ: the near-tie rule in one place, and engines and requests to apply it to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedcore import LLM, EnginePlan, SamplingParams
from pagedcore.front import _choice_seed
from pagedcore.outputs import CompletionOutput, RequestOutput
from pagedcore.sampling_params import MAX_LOGPROBS
from pagedcore_kernels import gumbel_noise

NEAR_TIE_GAPS = {"float32": 1e-3, "bfloat16": 0.05}
"""In logprob: kernels for other batch shapes round otherwise, and may so turn a gap below this around."""

FLOAT8_TIE_GAP = 0.5
"""With keys and values of 8 bits: what rounds otherwise in its last bit may go to the next of few values, a 16th apart."""


def near_tie_gap(plan: EnginePlan) -> float:
    """The limit for an engine's runs. Dummy weights have none: their logits lie so close that the rule would excuse anything."""
    assert plan.config.load_format != "dummy", "the near-tie rule says nothing about random weights"
    return FLOAT8_TIE_GAP if plan.kv_cache_dtype == "fp8_e4m3" else NEAR_TIE_GAPS[plan.dtype]


@dataclass(frozen=True)
class Reference:
    """Tokens to be met, and at each of them how far the runner-up was behind, in logprob."""

    token_ids: Sequence[int]
    gaps: Sequence[float]

    @classmethod
    def of_logits(cls, logits: Tensor) -> Reference:
        """Greedy tokens of logits [N, V]."""
        best, second = logits.float().log_softmax(-1).topk(2).values.T
        return cls(logits.argmax(-1).tolist(), (best - second).tolist())

    @classmethod
    def of_greedy(cls, choice: CompletionOutput) -> Reference:
        """Of a greedy run without penalties that asked for at least two logprobs."""
        assert choice.logprobs is not None
        ranked = [sorted((entry.logprob for entry in entries.values()), reverse=True) for entries in choice.logprobs]
        return cls(choice.token_ids, [values[0] - values[1] for values in ranked])

    @classmethod
    def of_draws(cls, choice: CompletionOutput, params: SamplingParams, other: Sequence[int]) -> Reference:
        """Of a seeded run with `MAX_LOGPROBS` logprobs. What ties in a draw is the score with its noise, in units of logprob; the
        runner-up is the token that `other` has where it first differs."""
        index = first_difference(choice.token_ids, other)
        gaps = [0.0 if index is None else float("inf")] * len(choice.token_ids)
        if index is not None and index < min(len(choice.token_ids), len(other)):
            scores = _draw_scores(choice, params, index)
            gaps[index] = abs(scores[choice.token_ids[index]] - scores.get(other[index], float("inf")))
        return cls(choice.token_ids, gaps)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that is not the same or not there; None for equal runs."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def assert_same_tokens(reference: Reference, token_ids: Sequence[int], limit: float) -> int:
    """The near-tie rule: equal up to the first difference, where the reference's top-two gap is below `limit`; nothing is compared
    after it. Returns how many tokens were equal."""
    index = first_difference(reference.token_ids, token_ids)
    if index is None:
        return len(token_ids)
    assert index < min(len(reference.token_ids), len(token_ids)), f"{len(token_ids)} tokens instead of {len(reference.token_ids)}"
    gap = reference.gaps[index]
    assert gap < limit, (
        f"token {index} is {token_ids[index]} instead of {reference.token_ids[index]}, whose runner-up is {gap:.6f} behind: "
        f"no near tie (limit {limit})"
    )
    return index


def assert_same_run(
    references: Sequence[RequestOutput], outputs: Sequence[RequestOutput], params: Sequence[SamplingParams], limit: float
) -> None:
    """The rule for every choice of every request; near ties must be rare, or nothing would have been compared."""
    equal = total = 0
    for reference, output, own in zip(references, outputs, params, strict=True):
        assert output.prompt_token_ids == reference.prompt_token_ids
        for choice, other in zip(reference.outputs, output.outputs, strict=True):
            found = _reference_of(choice, own, other.token_ids)
            equal += assert_same_tokens(found, other.token_ids, limit)
            total += len(choice.token_ids)
    assert equal >= 0.8 * total, f"only {equal} of {total} tokens were compared"


def _reference_of(choice: CompletionOutput, params: SamplingParams, other: Sequence[int]) -> Reference:
    if params.is_greedy and not params.has_penalties:
        return Reference.of_greedy(choice)
    return Reference.of_draws(choice, params, other)


def _draw_scores(choice: CompletionOutput, params: SamplingParams, index: int) -> dict[int, float]:
    """Logprob less penalties plus noise times temperature, of the likeliest tokens: the largest of those kept is drawn."""
    assert choice.logprobs is not None
    assert params.repetition_penalty == 1.0, "depends on the sign of the logit, which logprobs do not tell"
    assert params.seed is not None
    entries = choice.logprobs[index]
    seen = Counter(choice.token_ids[:index])
    seeds, indices = torch.tensor([_choice_seed(params.seed, choice.index)]), torch.tensor([index])
    noise = gumbel_noise(seeds, indices, torch.tensor(list(entries)))[0].tolist()
    temperature = 0.0 if params.is_greedy else params.temperature
    return {
        token: entry.logprob
        - params.frequency_penalty * seen[token]
        - (params.presence_penalty if seen[token] else 0.0)
        + temperature * own
        for (token, entry), own in zip(entries.items(), noise, strict=True)
    }


# ---- engines and requests


def real_llm(**options: Any) -> LLM:
    """The embedded model in float32 with a pool of 512 blocks, unless told otherwise."""
    return LLM(**{"dtype": "float32", "num_kv_blocks": 512, "max_model_len": 2048, **options})


STEM = (
    "You are a careful assistant of a small museum of ships, and you answer visitors in one or two plain sentences. The "
    "museum opens at ten in the morning and closes at six in the evening, except on Mondays, when it stays closed for "
    "cleaning. Tickets cost twelve euros for adults and five euros for children; members of the society of friends come in "
    "free of charge. The first hall shows fishing boats of the northern coast, the second one the engines of three paddle "
    "steamers, and the third one a collection of two hundred models, built between 1790 and 1930. Guided tours start every "
    "full hour at the anchor in the court, and last about fifty minutes. Dogs are not allowed inside; prams may be left at "
    "the entrance. The cafe on the upper floor serves soup, bread and coffee, and it has a view over the harbour. When you do"
    " not know an answer, say so, and give the telephone number of the office, which is 555 0142. Never promise a refund, and"
    " never guess at a price. School classes need a letter from their teacher, and they get a room for their coats and their "
    "lunch. In winter the boats in the court are covered, and the tour takes the way through the workshop, where two old sails "
    "are being mended by hand. A visitor asks: "
)
"""More tokens than the largest block: what two prompts share is cached at any block size."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=10, ignore_eos=True)


@dataclass(frozen=True)
class Request:
    prompt: str | list[int]
    params: SamplingParams


def mixed_requests() -> list[Request]:
    """Sixteen requests that differ in length, language and every sampling setting; two share a long stem."""
    penalised = DRAWN.replace(presence_penalty=0.4, frequency_penalty=0.3)
    return [
        Request(STEM + "how much is a ticket?", GREEDY),
        Request(STEM + "where do I leave my dog?", DRAWN),
        Request("The capital of France is", GREEDY),
        Request("def fibonacci(n):\n", GREEDY),
        Request("东京是日本的首都。", DRAWN.replace(seed=2)),
        Request("😀 🎉 🚀 😀 🎉", DRAWN.replace(seed=3, top_p=1.0, temperature=1.0)),
        Request("Once upon a time", GREEDY.replace(max_tokens=24)),
        Request("Once upon a time", DRAWN.replace(seed=4, n=3)),
        Request("1, 2, 3, 4, 5, 6,", penalised.replace(seed=5)),
        Request("The sea, the sea, the sea,", GREEDY.replace(presence_penalty=0.5, frequency_penalty=0.5)),
        Request([504], DRAWN.replace(seed=6, top_k=40, top_p=1.0)),
        Request(list(range(300, 316)), GREEDY),
        Request(list(range(300, 317)), DRAWN.replace(seed=7, min_p=0.05)),
        Request(list(range(400, 433)), GREEDY),
        Request("Dear Sir or Madam, I am writing to you about", penalised.replace(seed=8, top_k=20)),
        Request("SELECT name FROM users WHERE", DRAWN.replace(seed=9, temperature=1.3)),
    ]


def with_logprobs(requests: Sequence[Request]) -> list[Request]:
    """The same, fit to be references."""
    return [Request(request.prompt, request.params.replace(logprobs=MAX_LOGPROBS)) for request in requests]


def run_together(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    return llm.generate([request.prompt for request in requests], [request.params for request in requests])


def run_alone(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    """One request after another, each the only one in the engine."""
    return [llm.generate(request.prompt, request.params)[0] for request in requests]


def assert_partition(output: RequestOutput, block_size: int) -> None:
    """Every prompt token has one source, every eligible block was served or has one reason why not."""
    cache = output.cache
    assert cache is not None
    sources = (cache.live_tokens, cache.pool_tokens, cache.host_tokens, cache.computed_tokens, cache.abandoned_tokens)
    assert min(sources) >= 0
    assert sum(sources) == cache.num_prompt_tokens == len(output.prompt_token_ids)
    assert cache.num_eligible_blocks == (cache.num_prompt_tokens - 1) // block_size
    assert cache.num_cached_tokens // block_size + sum(cache.miss_blocks.values()) == cache.num_eligible_blocks
