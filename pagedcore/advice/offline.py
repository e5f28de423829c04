"""Advice for a trace: the same study as in a live engine, with a pool that need not exist."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from pagedcore.advice.advice import Advice
from pagedcore.advice.costly_prefixes import CostlyPrefix
from pagedcore.advice.prompt import Prompt
from pagedcore.advice.trace import TracedRequest
from pagedcore.advice.traffic_study import TrafficStudy
from pagedcore.core.block_hash import ROOT_HASH, hash_blocks, make_domain

MAX_TRACKED_BLOCKS = 65_536
"""More than in a live engine: a trace is studied once, with the memory of a process of its own."""


def advise(requests: Iterable[TracedRequest], block_size: int, num_blocks: int) -> Advice:
    """What a pool of `num_blocks` blocks of `block_size` tokens would do with this traffic, and what others would."""
    ordered = sorted(requests, key=lambda request: request.start_s)
    study = TrafficStudy(block_size, num_blocks, max_tracked_blocks=MAX_TRACKED_BLOCKS)
    running: list[tuple[float, int]] = []
    for number, request in enumerate(ordered):
        _finish_until(study, ordered, running, request.start_s)
        _admit(study, request, str(number))
        heapq.heappush(running, (request.end_s, number))
    window_s = max((request.end_s for request in ordered), default=0.0) - (ordered[0].start_s if ordered else 0.0)
    sketch = study.sketch
    return study.advice(hit_rate=sketch.hit_rate(), ideal_hit_rate=sketch.ideal_hit_rate(), window_s=window_s)


def _finish_until(study: TrafficStudy, ordered: list[TracedRequest], running: list[tuple[float, int]], now_s: float) -> None:
    while running and running[0][0] <= now_s:
        end_s, number = heapq.heappop(running)
        study.sketch.finish(str(number), ordered[number].num_output_tokens, now=end_s)


def _admit(study: TrafficStudy, request: TracedRequest, name: str) -> None:
    """Numbers are the names: a trace of several engines may say an id twice."""
    duration_s = request.end_s - request.start_s
    found = study.admit(
        Prompt(
            request_id=name,
            token_ids=request.prompt_token_ids,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            is_greedy=request.is_greedy,
        ),
        now=request.start_s,
        tokens_a_tick=request.num_output_tokens / duration_s if duration_s else 0.0,
    )
    num_evicted_tokens = study.sketch.num_evicted_tokens(found)
    if num_evicted_tokens:
        study.costly_prefixes.add(
            CostlyPrefix(
                prefix=_hash_of(request, found.num_known_tokens, study.sketch.block_size),
                tenant=request.tenant,
                num_tokens=found.num_known_tokens,
                recomputed_tokens=num_evicted_tokens,
                latest_request_id=request.request_id,
            )
        )


def _hash_of(request: TracedRequest, num_tokens: int, block_size: int) -> str:
    """The engine's hash of the block that ends there."""
    domain = make_domain(request.cache_salt, request.tenant)
    return hash_blocks(ROOT_HASH, domain, request.prompt_token_ids[:num_tokens], block_size)[-1].hex()
