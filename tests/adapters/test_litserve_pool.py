"""Which worker has which request of an API server: placed, followed, given up; and what the API servers tell each other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore import EngineClosedError, SamplingParams
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, RequestUpdate
from pagedcore.routing.prefix_keys import prefix_keys
from pagedcore.routing.router import RoutingPolicy
from pagedcore_adapters._litserve_client import WorkerClient
from pagedcore_adapters._litserve_gossip import Gossip
from pagedcore_adapters._litserve_messages import Drain, Sender, Traffic, WorkerAway, WorkerFacts, WorkerLost, WorkerReady
from pagedcore_adapters._litserve_pool import WorkerPool
from pagedcore_adapters._litserve_presence import Presence

ALL_EQUAL = RoutingPolicy(max_load_factor=1.0, free_load=1)


class Control:
    """A worker's queue that keeps what it was given."""

    def __init__(self) -> None:
        self.items: list[tuple[Sender, Any]] = []
        self.is_broken = False
        self.has_item = asyncio.Event()

    def put(self, item: tuple[Sender, Any]) -> None:
        if self.is_broken:
            raise BrokenPipeError
        self.items.append(item)
        self.has_item.set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise AssertionError("an API server never reads a control queue")

    @property
    def sent(self) -> list[str]:
        return [message.request_id for _, message in self.items]


def make_add(request_id: str, group_id: str | None = None, prompt: list[int] | None = None) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        group_id=group_id or request_id,
        prompt_token_ids=prompt or [1],
        params=SamplingParams(max_tokens=5),
        arrival_s=0.0,
    )


def last_update(request_id: str) -> RequestUpdate:
    return RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason="stop", status="completed")


def make_facts(incarnation: int = 0) -> WorkerFacts:
    plan: Any = SimpleNamespace(block_size=4, num_blocks=64)
    info: Any = SimpleNamespace(vocab_size=100, eos_token_ids=frozenset(), seed=0)
    return WorkerFacts(plan=plan, info=info, incarnation=incarnation)


def make_pool(*, warm: tuple[int, ...] = (0, 1), num_workers: int = 2, **options: Any) -> tuple[WorkerPool, list[Control]]:
    controls = [Control() for _ in range(num_workers)]
    return WorkerPool(3, controls, {one: make_facts() for one in warm}, **{"policy": ALL_EQUAL, **options}), controls


def spread(controls: list[Control]) -> list[int]:
    return [len(control.items) for control in controls]


# ---- placing


def test_a_request_goes_to_a_worker_with_the_fewest_open_ones() -> None:
    pool, controls = make_pool()
    for name in "abcd":
        pool.send(make_add(name))
    assert spread(controls) == [2, 2]
    assert {sender for control in controls for sender, _ in control.items} == {Sender(3, 0)}
    (busy, idle) = controls
    pool.note([last_update(name) for name in idle.sent])
    idle.items.clear()
    pool.send(make_add("e"))
    assert idle.sent == ["e"]
    assert len(busy.items) == 2


def test_a_prompt_follows_its_prefix_and_the_request_says_why() -> None:
    pool, controls = make_pool(policy=RoutingPolicy(free_load=3))
    shared = list(range(9))
    for name, prompt in (("a", [*shared, 11]), ("b", [*shared, 22]), ("c", [*shared, 33]), ("d", [*shared, 44])):
        pool.send(make_add(name, prompt=prompt))
    pool.send(make_add("e#0", "d", [*shared, 44]))
    reasons = {message.request_id: message.routing for control in controls for _, message in control.items}
    assert reasons == {"a": "load", "b": "prefix", "c": "prefix", "d": "overload", "e#0": "group"}
    assert sorted(control.sent for control in controls) == [["a", "b", "c"], ["d", "e#0"]]


def test_choices_of_one_request_stay_together_and_what_follows_goes_where_they_went() -> None:
    pool, controls = make_pool()
    pool.send(make_add("a"))
    for name in ("b", "b#1", "b#2"):
        pool.send(make_add(name, "b"))
    pool.send(FinishRequest("b#1", 2, "x"))
    pool.send(AbortRequest("b"))
    assert sorted(control.sent for control in controls) == [["a"], ["b", "b#1", "b#2", "b#1", "b"]]


def test_an_abort_of_an_ended_request_goes_nowhere() -> None:
    pool, controls = make_pool()
    pool.send(make_add("a"))
    pool.note([last_update("a")])
    pool.send(AbortRequest("a"))
    assert sum(spread(controls)) == 1


def test_an_update_that_does_not_end_a_request_keeps_its_worker() -> None:
    pool, controls = make_pool()
    pool.send(make_add("a"))
    pool.note([RequestUpdate(request_id="a", new_token_ids=[1])])
    pool.send(AbortRequest("a"))
    assert sorted(control.sent for control in controls) == [[], ["a", "a"]]


def test_a_broken_queue_is_a_closed_engine() -> None:
    pool, controls = make_pool(num_workers=1, warm=(0,))
    controls[0].is_broken = True
    with pytest.raises(EngineClosedError, match="shutting down"):
        pool.send(make_add("a"))


# ---- workers that come and go


def test_a_worker_that_is_not_warm_gets_nothing_until_it_says_that_it_is() -> None:
    pool, controls = make_pool(warm=(1,))
    pool.send(make_add("a"))
    pool.send(make_add("b"))
    pool.note_worker(WorkerReady(0))
    pool.send(make_add("c"))
    assert [control.sent for control in controls] == [["c"], ["a", "b"]]


def test_the_requests_of_a_lost_worker_fail_and_no_other_and_it_gets_no_more() -> None:
    pool, controls = make_pool()
    for name in "abcd":
        pool.send(make_add(name))
    lost, kept = [control.sent for control in controls]
    updates = pool.note_worker(WorkerLost(0, "exit code -9"))
    assert [update.request_id for update in updates] == lost
    for update in updates:
        assert (update.status, type(update.error)) == ("error", EngineClosedError)
        assert str(update.error) == "Worker process 0 has ended (exit code -9) and took this request with it; send it again."
    pool.note(updates)
    pool.send(make_add("e"))
    assert controls[1].sent == [*kept, "e"]
    pool.note_worker(WorkerLost(1, "there is no memory left."))
    with pytest.raises(EngineClosedError, match=r"0 starts again after it ended \(exit code -9\), 1 starts again .* \(there is no memory"):
        pool.send(make_add("f"))


def test_a_worker_that_is_back_gets_requests_in_its_new_life_and_knows_no_prefix() -> None:
    pool, controls = make_pool(policy=RoutingPolicy())
    shared = list(range(9))
    pool.send(make_add("a", prompt=shared))
    first = 0 if controls[0].items else 1
    pool.note(pool.note_worker(WorkerLost(first, "exit code -9")))
    pool.send(make_add("b", prompt=shared))
    assert controls[1 - first].sent == ["b"]
    pool.note_worker(WorkerReady(first, 1))
    pool.send(make_add("c", prompt=shared))
    assert controls[1 - first].sent == ["b", "c"]
    for name in "defg":
        pool.send(make_add(name, prompt=[50, *shared]))
    assert {sender.incarnation for sender, _ in controls[first].items[1:]} == {1}


def test_all_workers_ready_is_said_or_which_is_not() -> None:
    pool, _ = make_pool(num_workers=3, warm=(1,))
    with pytest.raises(EngineClosedError, match=r"^1 of 3 worker processes are ready: 0 starts, 2 starts\.$"):
        pool.workers.check_all_ready()
    pool.note_worker(WorkerLost(2, "exit code 1"))
    pool.note_worker(WorkerReady(0))
    with pytest.raises(EngineClosedError, match=r"^2 of 3 .*: 2 starts again after it ended \(exit code 1\)\.$"):
        pool.workers.check_all_ready()
    pool.note_worker(WorkerReady(2, 1))
    pool.workers.check_all_ready()


def test_a_worker_whose_engine_is_away_gets_no_more_fails_its_requests_itself_and_knows_no_prefix_when_it_is_back() -> None:
    pool, controls = make_pool(policy=RoutingPolicy())
    prompt = list(range(9))
    pool.send(make_add("a", prompt=prompt))
    pool.note([last_update("a")])
    (worker_id,) = [one for one, control in enumerate(controls) if control.items]
    pool.send(make_add("b", prompt=prompt))
    assert pool.note_worker(WorkerAway(worker_id, "it was killed")) == []
    pool.send(make_add("c", prompt=prompt))
    assert controls[1 - worker_id].sent == ["c"]
    pool.note([last_update("b"), last_update("c")])
    assert pool.note_worker(WorkerReady(worker_id)) == []
    pool.send(make_add("d", prompt=prompt))
    assert controls[1 - worker_id].sent == ["c", "d"], "the other one has the prefix now"


def test_giving_up_aborts_each_open_request_where_it_is() -> None:
    pool, controls = make_pool()
    for name in "abc":
        pool.send(make_add(name))
    pool.note([last_update("b")])
    updates = pool.give_up("The server shuts down.")
    assert {update.request_id: str(update.error) for update in updates} == dict.fromkeys("ac", "The server shuts down.")
    aborts = [message.request_id for control in controls for _, message in control.items if isinstance(message, AbortRequest)]
    assert sorted(aborts) == ["a", "c"]
    for control in controls:
        added = {message.request_id for _, message in control.items if isinstance(message, AddRequest)}
        assert {message.request_id for _, message in control.items if isinstance(message, AbortRequest)} <= added


# ---- what API servers tell each other


@pytest.mark.asyncio
async def test_what_happens_in_a_short_time_is_told_at_once_with_the_loads_at_its_end() -> None:
    told: list[Traffic] = []
    pool, _ = make_pool(tell_others=told.append)
    prompt = list(range(9))
    pool.send(make_add("a", prompt=prompt))
    pool.send(make_add("b"))
    pool.note([last_update("a")])
    await pool._gossip._sending  # type: ignore[union-attr, misc]
    (news,) = told
    assert news.queue_id == 3
    assert [(keys, sum(news.loads)) for _, keys in news.prompts] == [(prefix_keys(make_add("x", prompt=prompt), 4), 1), ([], 1)]
    pool.note([last_update("b")])
    await pool._gossip._sending  # type: ignore[union-attr, misc]
    assert told[1:] == [Traffic(3, [], [0, 0])]


def test_a_prompt_goes_where_another_api_server_has_sent_it() -> None:
    prompt = list(range(9))
    for worker_id in (0, 1):
        pool, controls = make_pool(policy=RoutingPolicy())
        pool.note_traffic(Traffic(5, [(worker_id, prefix_keys(make_add("x", prompt=prompt), 4))], [1, 1]))
        pool.send(make_add("a", prompt=prompt))
        assert controls[worker_id].sent == ["a"]


def test_the_load_that_comes_through_another_api_server_counts() -> None:
    for busy in (0, 1):
        pool, controls = make_pool()
        pool.note_traffic(Traffic(5, [], [3 * (busy == 0), 3 * (busy == 1)]))
        pool.send(make_add("a"))
        assert controls[1 - busy].sent == ["a"]


@pytest.mark.asyncio
async def test_nobody_left_to_tell_is_no_fault() -> None:
    def tell(_: Traffic) -> None:
        raise BrokenPipeError

    gossip = Gossip(0, tell, list)
    gossip.note_loads()
    assert gossip._sending is not None
    await gossip._sending


# ---- the client of an API server


async def started_client(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[WorkerClient, list[Control]]:
    monkeypatch.setattr("pagedcore_adapters._litserve_client.load_text", lambda _: None)
    client, controls = WorkerClient(ALL_EQUAL), [Control(), Control()]
    client.start(3, controls, {0: make_facts(), 1: make_facts()}, **options)
    return client, controls


async def outputs_of(client: WorkerClient, name: str) -> list[Any]:
    return [output async for output in client.generate([1, 2], SamplingParams(max_tokens=5), name)]


async def until_sent(controls: list[Control]) -> None:
    """One of the workers has a message."""
    waiting = [asyncio.ensure_future(control.has_item.wait()) for control in controls]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


@pytest.mark.asyncio
async def test_a_client_that_is_not_started_is_neither_ready_nor_usable() -> None:
    client = WorkerClient()
    assert not await client.is_ready()
    assert not await client.is_alive()
    with pytest.raises(EngineClosedError, match="not started"):
        _ = client.info
    with pytest.raises(EngineClosedError, match="not started"):
        await client.inspect("stats")


@pytest.mark.asyncio
async def test_ready_needs_all_workers_and_alive_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = await started_client(monkeypatch)
    assert await client.is_ready()
    client.receive(WorkerLost(1, "exit code -9"))
    with pytest.raises(EngineClosedError, match="1 of 2 worker processes are ready"):
        await client.is_ready()
    assert await client.is_alive()
    client.receive(WorkerLost(0, "exit code -9"))
    with pytest.raises(EngineClosedError, match="No worker process can take a request"):
        await client.is_alive()
    client.receive(WorkerReady(0, 1))
    client.receive(WorkerReady(1, 1))
    assert await client.is_ready()


@pytest.mark.asyncio
async def test_a_worker_whose_engine_is_away_is_not_ready_and_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = await started_client(monkeypatch)
    client.receive(WorkerAway(1, "The engine process 5 was killed."))
    with pytest.raises(EngineClosedError, match=r"1 of 2 .* are ready: 1 waits for its engine \(The engine process 5 was killed\.\)\."):
        await client.is_ready()
    client.receive(WorkerAway(0, "It was killed, too."))
    with pytest.raises(EngineClosedError, match="No worker process can take a request: 0 waits for its engine"):
        await outputs_of(client, "a")
    assert await client.is_alive(), "its worker starts it again"
    client.receive(WorkerLost(1, "exit code 1"))
    with pytest.raises(EngineClosedError, match=r"0 waits for its engine .* 1 starts again after it ended"):
        await client.is_ready()
    client.receive(WorkerLost(0, "exit code 1"))
    with pytest.raises(EngineClosedError, match="0 starts again after it ended"):
        await client.is_alive()
    client.receive(WorkerReady(0, 1))
    client.receive(WorkerReady(1, 1))
    assert await client.is_ready()


def test_a_worker_tells_when_its_engine_goes_and_comes_and_nothing_between() -> None:
    told: list[Any] = []
    reasons = [None, None, "lost", "lost", "killed", None, None]

    def check() -> None:
        if reasons[0] is not None:
            raise EngineClosedError(reasons[0])

    presence = Presence(4, 2, check, told.append)
    while reasons:
        presence.look()
        del reasons[0]
    assert told == [WorkerReady(4, 2), WorkerAway(4, "lost"), WorkerAway(4, "killed"), WorkerReady(4, 2)]


@pytest.mark.asyncio
async def test_a_drain_refuses_new_requests_and_says_so_when_the_open_ones_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    drained = asyncio.Event()
    client, controls = await started_client(monkeypatch, on_drained=drained.set)
    reading = asyncio.ensure_future(outputs_of(client, "a"))
    await until_sent(controls)
    client.receive(Drain(30.0))
    assert not await client.is_ready()
    assert await client.is_alive()
    with pytest.raises(EngineClosedError, match="draining"):
        await outputs_of(client, "b")
    assert not drained.is_set()
    client.receive([RequestUpdate("a", [7], finish_reason="length", status="completed")])
    assert (await reading)[-1].status == "completed"
    await asyncio.wait_for(drained.wait(), 60)


@pytest.mark.asyncio
async def test_what_does_not_end_while_the_server_drains_is_ended_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    drained = asyncio.Event()
    client, controls = await started_client(monkeypatch, on_drained=drained.set)
    reading = asyncio.ensure_future(outputs_of(client, "a"))
    await until_sent(controls)
    client.receive(Drain(0.01))
    await asyncio.wait_for(drained.wait(), 60)
    last = (await reading)[-1]
    assert (last.status, type(last.error)) == ("error", EngineClosedError)
    assert "did not end within 0.01 s; send it again" in str(last.error)
    assert [type(message) for control in controls for _, message in control.items] == [AddRequest, AbortRequest]
