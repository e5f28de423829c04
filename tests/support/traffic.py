"""Traffic told by one seed, and its replay by the real scheduler: what hit rate did that pool really have?"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedcore.advice.trace import TracedRequest, TraceWriter
from pagedcore.core.events import Admitted, StepEvents
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import StepPlan, StepResult
from pagedcore.messages import AddRequest
from support.core_builders import make_request

VOCAB_SIZE = 50_000


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """A whole trace file."""
    writer = TraceWriter(path)
    for request in requests:
        writer.write(request)
    writer.close()


@dataclass(frozen=True, slots=True)
class Visit:
    """A request, the turn in which it comes, and what will be generated for it."""

    turn: int
    request: AddRequest
    answer: list[int]


def shared_prompt_and_documents(seed: int, num_requests: int = 150) -> list[Visit]:
    """One system prompt, then one of many documents, the popular ones far more often, then a question of its own."""
    rng = random.Random(seed)
    system = _tokens(rng, 75)
    documents = [_tokens(rng, rng.randint(80, 400)) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    visits = []
    for index in range(num_requests):
        document = rng.choices(documents, weights)[0]
        visits.append(_visit(rng, index, index * 4, system + document + _tokens(rng, rng.randint(5, 40))))
    return visits


def chats(seed: int, num_chats: int = 24, num_turns: int = 6) -> list[Visit]:
    """Conversations that interleave: each turn repeats all before it, answers included."""
    rng = random.Random(seed)
    system = _tokens(rng, 60)
    visits, index = list[Visit](), 0
    for chat in range(num_chats):
        prompt = list(system)
        turn = chat * 30
        for _ in range(num_turns):
            prompt = prompt + _tokens(rng, rng.randint(10, 80))
            visit = _visit(rng, index, turn, prompt)
            visits.append(visit)
            prompt = prompt + visit.answer
            turn += rng.randint(40, 200)
            index += 1
    return sorted(visits, key=lambda visit: visit.turn)


def random_prompts(seed: int, num_requests: int = 80) -> list[Visit]:
    """Nothing is ever shared."""
    rng = random.Random(seed)
    return [_visit(rng, index, index * 4, _tokens(rng, rng.randint(20, 500))) for index in range(num_requests)]


def looping_scan(seed: int, num_documents: int = 24, num_rounds: int = 6) -> list[Visit]:
    """The same documents in the same order, again and again: LRU holds all of them or none."""
    rng = random.Random(seed)
    documents = [_tokens(rng, rng.randint(100, 300)) for _ in range(num_documents)]
    prompts = [documents[index % num_documents] + _tokens(rng, 10) for index in range(num_documents * num_rounds)]
    return [_visit(rng, index, index * 5, prompt) for index, prompt in enumerate(prompts)]


def tenants_with_salts(seed: int, num_requests: int = 150) -> list[Visit]:
    """Tenants with the same prompts, which they do not share, some under a salt."""
    rng = random.Random(seed)
    stems = [_tokens(rng, rng.randint(60, 300)) for _ in range(8)]
    domains = [("a", None), ("b", None), ("b", "s"), (None, None)]
    visits = []
    for index in range(num_requests):
        tenant, salt = rng.choices(domains, [4, 3, 2, 1])[0]
        prompt = rng.choice(stems) + _tokens(rng, rng.randint(5, 60))
        visits.append(_visit(rng, index, index * 4, prompt, tenant=tenant, cache_salt=salt))
    return visits


def bursts(seed: int, num_requests: int = 168) -> list[Visit]:
    """Requests that come together, more than can run at once."""
    rng = random.Random(seed)
    documents = [_tokens(rng, rng.randint(50, 300)) for _ in range(70)]
    weights = [1 / (rank + 1) ** 0.7 for rank in range(len(documents))]
    prompts = [rng.choices(documents, weights)[0] + _tokens(rng, rng.randint(5, 30)) for _ in range(num_requests)]
    return [_visit(rng, index, index // 24 * 80, prompt) for index, prompt in enumerate(prompts)]


TRAFFIC: dict[str, Callable[[int], list[Visit]]] = {
    "shared prompt and documents": shared_prompt_and_documents,
    "chats": chats,
    "random prompts": random_prompts,
    "looping scan": looping_scan,
    "tenants with salts": tenants_with_salts,
    "bursts": bursts,
}


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def _visit(rng: random.Random, index: int, turn: int, prompt: list[int], **fields: str | None) -> Visit:
    answer = _tokens(rng, rng.randint(2, 24))
    return Visit(turn, make_request(f"r{index}", prompt, max_tokens=len(answer), **fields), answer)


class ScriptedRunner:
    """Generates the answer that each visit names."""

    def __init__(self, visits: list[Visit]) -> None:
        self._answers = {visit.request.request_id: visit.answer for visit in visits}
        self._rows: dict[int, Iterator[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.admitted:
            num_generated = len(row.token_ids) - row.num_prompt_tokens
            self._rows[row.row] = iter(self._answers[row.request_id][num_generated:])
        tokens = [next(self._rows[row]) for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        return StepResult(step_id=plan.step_id, sampled_token_ids=tokens)


def make_replay_limits(block_size: int, num_blocks: int, num_host_blocks: int = 0) -> SchedulerLimits:
    return SchedulerLimits(
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
    )


def replay(
    visits: list[Visit],
    *,
    block_size: int,
    num_blocks: int,
    num_host_blocks: int = 0,
    record: Callable[[StepEvents], None] | None = None,
    resets: Collection[int] = (),
) -> float:
    """Serve the traffic with a pool of that size; returns its hit rate. `record` sees every step's events. `resets` are turns at which
    the cache is reset."""
    scheduler = Scheduler(make_replay_limits(block_size, num_blocks, num_host_blocks))
    runner, waiting = ScriptedRunner(visits), deque(visits)
    turn, num_hits, num_tokens = 0, 0, 0
    while waiting or scheduler.has_work:
        while waiting and waiting[0].turn <= turn:
            scheduler.add(waiting.popleft().request, float(turn))
        if turn in resets:
            scheduler.reset_prefix_cache(float(turn))
        plan = scheduler.schedule(float(turn))
        if plan is not None:
            scheduler.commit(plan, runner.run(plan), float(turn))
        scheduler.take_updates()
        step = scheduler.take_events()
        for event in step.events:
            if isinstance(event, Admitted) and event.lookup is not None:
                num_hits += event.lookup.num_hit_tokens
                num_tokens += event.lookup.num_prompt_tokens
        if record is not None:
            record(step)
        turn += 1
    return num_hits / num_tokens
