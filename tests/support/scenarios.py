"""Random runs of the whole core, each told by one seed, checked against a loop that generates every request alone."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from pagedcore.core.events import Admitted, Arrived, BlockEvicted, Finished, Preempted, PrefillChunk, Resumed
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.host_tier.swapped import Swapped
from pagedcore.messages import AddRequest
from support.core_builders import Driver, make_request
from support.fake_runner import VOCAB_SIZE, FakeRunner, next_token


@dataclass(slots=True)
class Scenario:
    """What happens when: everything is decided before the run starts."""

    limits: SchedulerLimits
    arrivals: dict[int, list[AddRequest]]
    """Turn -> requests added in it."""
    aborts: dict[int, list[str]]
    finishes: dict[str, int]
    """Request id -> output tokens after which the front ends it."""
    resets: set[int]
    failing_steps: set[int] = field(default_factory=set)
    row_errors: dict[str, str] = field(default_factory=dict)

    @property
    def requests(self) -> list[AddRequest]:
        return [request for requests in self.arrivals.values() for request in requests]


def make_scenario(seed: int, *, has_host_tier: bool = False) -> Scenario:
    """Draw a scenario. Pools are so small that requests give way to each other all the time. A host tier changes nothing else."""
    rng = random.Random(seed)
    limits = _draw_limits(rng)
    if has_host_tier:
        limits = replace(limits, enable_prefix_caching=True, num_host_blocks=random.Random(f"host {seed}").choice((1, 2, 3, 5, 9, 40)))
    requests = _draw_requests(rng, limits)
    num_turns = rng.choice((1, 5, 30))
    arrivals: dict[int, list[AddRequest]] = defaultdict(list)
    for request in requests:
        arrivals[rng.randrange(num_turns)].append(request)
    ids = [request.request_id for request in requests]
    aborts: dict[int, list[str]] = defaultdict(list)
    for request_id in rng.sample(ids, rng.randrange(len(ids) // 2 + 1)):
        aborts[rng.randrange(60)].append(request_id)
    scenario = Scenario(
        limits=limits,
        arrivals=arrivals,
        aborts=aborts,
        finishes={request_id: rng.randint(1, 6) for request_id in rng.sample(ids, len(ids) // 4)},
        resets={rng.randrange(60)} if rng.random() < 0.2 else set(),
    )
    if rng.random() < 0.3:
        scenario.failing_steps = {rng.randrange(12), rng.randrange(40)}
    if rng.random() < 0.2:
        scenario.row_errors = {rng.choice(ids): "every token is masked"}
    return scenario


def _draw_limits(rng: random.Random) -> SchedulerLimits:
    block_size = rng.choice((1, 2, 3, 4, 8))
    num_blocks = rng.randint(max(3, 16 // block_size), max(6, 60 // block_size))
    return SchedulerLimits(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=min(num_blocks * block_size, rng.randint(12, 48)),
        max_num_seqs=rng.randint(1, 7),
        max_num_batched_tokens=rng.choice((1, 3, 7, 16, 64)),
        scheduling_policy=rng.choice(("fcfs", "priority")),
        enable_prefix_caching=rng.random() < 0.85,
        watermark_fraction=rng.choice((0.0, 0.05, 0.3)),
        max_preemptions=rng.choice((1, 1, 2, 4)),
        max_batch_wait_s=rng.choice((0.0, 0.0, 4.0)),
        num_in_flight_steps=rng.choice((1, 2, 2, 3, 3)),
        max_chunk_tokens=rng.choice((None, 1, 2, 5)),
        max_prefix_wait_steps=rng.choice((0, 1, 20)),
        max_bypasses=rng.choice((0, 1, 5)),
    )


def _draw_requests(rng: random.Random, limits: SchedulerLimits) -> list[AddRequest]:
    longest = limits.max_model_len
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(longest)] for _ in range(rng.randint(1, 3))]
    requests: list[AddRequest] = []
    for index in range(rng.randint(4, 14)):
        num_prompt = rng.randint(1, longest - 1)
        num_shared = rng.choice((0, rng.randint(0, num_prompt), num_prompt))
        prompt = rng.choice(stems)[:num_shared] + [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt - num_shared)]
        num_choices = rng.choice((1, 1, 1, 2))
        max_tokens = rng.choice((None, rng.randint(1, longest - num_prompt)))
        requests += [_draw_request(rng, f"r{index}", prompt, max_tokens, choice, num_choices) for choice in range(num_choices)]
    if limits.scheduling_policy == "fcfs":  # which refuses priorities; drawn all the same, so that seeds mean what they did
        return [replace(request, priority=0) for request in requests]
    return requests


def _draw_request(
    rng: random.Random, group_id: str, prompt: list[int], max_tokens: int | None, choice: int, num_choices: int
) -> AddRequest:
    return make_request(
        group_id if choice == 0 else f"{group_id}#{choice}",
        prompt,
        max_tokens=max_tokens,
        group_id=group_id,
        choice_index=choice,
        num_choices=num_choices,
        min_tokens=rng.choice((0, 0, min(3, max_tokens or 0))),
        logprobs=rng.choice((None, None, 0)),
        prompt_logprobs=rng.choice((None, None, None, 0)),
        stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 2)))),
        priority=rng.randrange(3),
        tenant=rng.choice((None, None, None, None, "a", "")),
        cache_salt=rng.choice((None, None, None, None, "s")),
    )


def alone(request: AddRequest, limits: SchedulerLimits) -> tuple[list[int], str]:
    """The tokens and finish reason of a request that has the machine for itself."""
    token_ids = list(request.prompt_token_ids)
    num_prompt = len(token_ids)
    max_total = limits.max_model_len if request.params.max_tokens is None else num_prompt + request.params.max_tokens
    while True:
        token_ids.append(next_token(token_ids))
        num_output = len(token_ids) - num_prompt
        if token_ids[-1] in request.stop_token_ids and num_output > request.params.min_tokens:
            return token_ids[num_prompt:], "stop"
        if len(token_ids) == max_total:
            return token_ids[num_prompt:], "length"


def run_scenario(scenario: Scenario) -> Driver:
    """Play a scenario to its end; raises AssertionError at the first step that breaks a rule."""
    limits = scenario.limits
    runner = FakeRunner(limits.num_blocks, limits.block_size, scenario.failing_steps, scenario.row_errors)
    driver = Driver(Scheduler(limits), runner)
    last_arrival = max(scenario.arrivals)
    turn = 0
    while turn <= last_arrival or driver.scheduler.has_work:
        for request in scenario.arrivals.get(turn, ()):
            driver.scheduler.add(request, driver.now_s)
        for request_id in scenario.aborts.get(turn, ()):
            driver.scheduler.abort(request_id, driver.now_s)
        if turn in scenario.resets:
            driver.scheduler.reset_prefix_cache(driver.now_s)
        _turn(driver)
        for request_id, num_tokens in scenario.finishes.items():
            if len(driver.tokens[request_id]) >= num_tokens:
                driver.scheduler.finish(request_id, num_tokens, "stop string", driver.now_s)
        turn += 1
        assert turn < 5_000, "the run does not end"
    driver.take()
    return driver


def _turn(driver: Driver) -> None:
    """One turn; with nothing in flight and something to do it must advance or preempt."""
    is_idle = not driver.in_flight
    had_work = driver.scheduler.can_schedule
    num_preempted = len(driver.events_of(Preempted))
    plan = driver.turn()
    if is_idle and had_work and plan is None and driver.scheduler.next_wake_s(driver.now_s) is None:
        assert len(driver.events_of(Preempted)) > num_preempted, "a schedule neither advanced nor preempted"


def check_outcome(scenario: Scenario, driver: Driver) -> None:
    """Every request ended once, with the tokens of a run alone, and the books balance."""
    for request in scenario.requests:
        _check_request(scenario, driver, request)
    counts = driver.counts()
    assert (counts.num_running, counts.num_waiting, counts.num_active_blocks) == (0, 0, 0)
    _check_events(scenario, driver)
    _check_bulk_counts(driver)


def _check_request(scenario: Scenario, driver: Driver, request: AddRequest) -> None:
    expected, reason = alone(request, scenario.limits)
    tokens, last = driver.tokens[request.request_id], driver.last[request.request_id]
    assert tokens == expected[: len(tokens)], f"{request.request_id}: {tokens} and alone {expected}"
    if last.status == "completed" and last.stop_reason != "stop string":
        assert (tokens, last.finish_reason) == (expected, reason), f"{request.request_id}: {last.finish_reason}, alone {reason}"
    if request.params.logprobs is not None:
        assert [list(entry) for entry in driver.logprobs[request.request_id]] == [[token] for token in tokens]
    if request.params.prompt_logprobs is not None and tokens:
        _check_prompt_logprobs(driver, request)
    _check_partition(scenario, driver, request)
    _check_isolation(scenario, driver, request)


def _check_prompt_logprobs(driver: Driver, request: AddRequest) -> None:
    dicts = driver.first[request.request_id].prompt_logprobs
    assert dicts is not None
    assert dicts[0] is None
    assert [list(entry or ()) for entry in dicts[1:]] == [[token] for token in request.prompt_token_ids[1:]]


def _check_partition(scenario: Scenario, driver: Driver, request: AddRequest) -> None:
    last = driver.last[request.request_id]
    report = last.cache
    assert report is not None
    num_prompt = len(request.prompt_token_ids)
    parts = (report.live_tokens, report.pool_tokens, report.host_tokens, report.computed_tokens, report.abandoned_tokens)
    assert min(parts) >= 0, f"{request.request_id}: {parts}"
    assert sum(parts) == num_prompt == report.num_prompt_tokens, f"{request.request_id}: {parts} of {num_prompt}"
    if last.status == "completed":
        assert report.abandoned_tokens == 0
    if last.status != "error" and not scenario.failing_steps:
        num_cached = report.num_cached_tokens  # a hit that a preemption lost is recomputed work, not a computed prompt token
        positions = {p for p in driver.runner.computed_positions.get(request.request_id, ()) if num_cached <= p < num_prompt}
        assert report.computed_tokens == len(positions), (
            f"{request.request_id}: {report.computed_tokens} reported, {len(positions)} computed"
        )


def _check_isolation(scenario: Scenario, driver: Driver, request: AddRequest) -> None:
    """What the cache served was computed by a request of the same salt and tenant."""
    report = driver.last[request.request_id].cache
    assert report is not None
    served = request.prompt_token_ids[: report.num_cached_tokens]
    domain = (request.cache_salt, request.tenant)
    peers = (peer for peer in scenario.requests if (peer.cache_salt, peer.tenant) == domain and peer is not request)
    texts = (peer.prompt_token_ids + alone(peer, scenario.limits)[0] for peer in peers)
    assert not served or any(text[: len(served)] == served for text in texts), f"{request.request_id} read another domain's blocks"


def _check_events(scenario: Scenario, driver: Driver) -> None:
    ids = Counter(request.request_id for request in scenario.requests)
    assert Counter(event.request.request_id for event in driver.events_of(Arrived)) == ids
    finished = driver.events_of(Finished)
    assert Counter(event.request.request_id for event in finished) == ids
    admitted = Counter(event.request_id for event in driver.events_of(Admitted))
    assert not admitted or max(admitted.values()) == 1, "a lookup was recorded twice"
    preempted = Counter(event.request_id for event in driver.events_of(Preempted))
    assert not preempted or max(preempted.values()) <= scenario.limits.max_preemptions
    _check_swaps(driver)
    for event in finished:
        assert event.num_preemptions == preempted[event.request.request_id]
        if event.status != "error":
            num_tokens = len(driver.tokens[event.request.request_id])
            sampled = event.num_output_tokens + event.num_discarded_tokens
            assert sampled >= num_tokens >= event.num_output_tokens


def _check_swaps(driver: Driver) -> None:
    """Blocks go out while their request waits after a preemption, and come back at the moment it is resumed."""
    waiting: set[str] = set()
    resumed: tuple[str, float] | None = None
    for event in driver.events:
        if isinstance(event, Preempted):
            waiting.add(event.request_id)
        elif isinstance(event, Resumed):
            waiting.remove(event.request_id)
            resumed = (event.request_id, event.now_s)
        elif isinstance(event, Finished):
            waiting.discard(event.request.request_id)
        elif isinstance(event, Swapped):
            is_due = event.request_id in waiting if event.direction == "out" else resumed == (event.request_id, event.now_s)
            assert is_due and event.num_blocks > 0, f"{event} comes at another time"


def _check_bulk_counts(driver: Driver) -> None:
    num_computed = sum(map(len, driver.runner.computed_positions.values()))
    assert sum(step.num_generated_tokens for step in driver.steps) == sum(map(len, driver.tokens.values()))
    num_first = sum(1 for tokens in driver.tokens.values() if tokens)
    assert sum(len(step.inter_token_gaps_s) for step in driver.steps) == sum(map(len, driver.tokens.values())) - num_first
    if not driver.runner.failing_steps:
        assert sum(step.num_tokens for step in driver.steps) == num_computed
        num_copied = driver.runner.num_copied
        assert sum(step.num_swapped_out_blocks for step in driver.steps) == num_copied["out"]
        assert sum(step.num_swapped_in_blocks for step in driver.steps) == num_copied["in"]


def rare_paths(scenario: Scenario, driver: Driver) -> Counter[str]:
    """How often each path that matters was taken."""
    counts = driver.counts()
    finished = driver.events_of(Finished)
    lookups = [event.lookup for event in driver.events_of(Admitted) if event.lookup is not None]
    chunks = Counter(event.request_id for event in driver.events_of(PrefillChunk))
    return Counter(
        {
            "preemption": len(driver.events_of(Preempted)),
            "resume": len(driver.events_of(Resumed)),
            "protected": sum(event.num_preemptions >= scenario.limits.max_preemptions for event in finished),
            "eviction": len(driver.events_of(BlockEvicted)),
            "live hit": sum(lookup.live_blocks for lookup in lookups),
            "pool hit": sum(lookup.pool_blocks for lookup in lookups),
            "host hit": sum(lookup.host_blocks for lookup in lookups),
            "swapped out": sum(event.direction == "out" for event in driver.events_of(Swapped)),
            "swapped in": sum(event.direction == "in" for event in driver.events_of(Swapped)),
            "failed copy": len(driver.runner.failing_steps.intersection(driver.steps_with_copies)),
            "hole": sum(is_resident for lookup in lookups for _, is_resident, _ in lookup.missed),
            "in flight miss": sum(is_computed for lookup in lookups for _, _, is_computed in lookup.missed),
            "chunked prefill": sum(count > 1 for count in chunks.values()),
            "prefix wait": counts.num_prefix_waits,
            "bypass": counts.num_bypasses,
            "stall": counts.num_stalls,
            "deferred free": counts.num_deferred_frees,
            "discarded token": sum(event.num_discarded_tokens for event in finished),
            "abort": sum(event.status == "aborted" for event in finished),
            "error": sum(event.status == "error" for event in finished),
            "stop": sum(event.finish_reason == "stop" for event in finished),
            "abandoned": sum(event.num_abandoned_prompt_tokens for event in finished),
            "overlap": scenario.limits.num_in_flight_steps - 1,
        }
    )
