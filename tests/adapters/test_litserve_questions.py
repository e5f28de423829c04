"""Operators' questions between API servers and workers: each answer finds its question, and none waits for ever."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore.errors import EngineClosedError, InvalidRequestError, NoAnswerError
from pagedcore_adapters._litserve_client import WorkerClient
from pagedcore_adapters._litserve_messages import WorkerLost
from pagedcore_adapters._litserve_questions import Answer, Answerer, Asker, Question
from support.served import wait_until


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Sent:
    """Remembers each question by its worker, and lets the test answer."""

    def __init__(self, **options: Any) -> None:
        self.questions: list[tuple[int, Question]] = []
        self.asker = Asker(lambda worker_id, question: self.questions.append((worker_id, question)), **options)

    async def ask(self, *worker_ids: int) -> asyncio.Task[list[dict[str, Any]]]:
        """A question that has been sent and waits."""
        num_sent = len(self.questions)
        task = asyncio.create_task(self.asker.ask(worker_ids, "stats", {"a": 1}))
        await settle()
        assert len(self.questions) == num_sent + len(worker_ids)
        return task


# ---- the API server's side


@pytest.mark.asyncio
async def test_answers_come_in_the_order_of_the_workers_whichever_is_first() -> None:
    sent = Sent()
    task = await sent.ask(0, 1)
    assert [(worker_id, question.name, question.arguments) for worker_id, question in sent.questions] == [
        (0, "stats", {"a": 1}),
        (1, "stats", {"a": 1}),
    ]
    for worker_id, question in reversed(sent.questions):
        sent.asker.receive(Answer(question.number, {"engine": worker_id}))
    assert await task == [{"engine": 0}, {"engine": 1}]


@pytest.mark.asyncio
async def test_two_questions_at_once_get_their_own_answers() -> None:
    sent = Sent()
    first, second = await sent.ask(0), await sent.ask(0)
    (_, one), (_, two) = sent.questions
    sent.asker.receive(Answer(two.number, {"n": 2}))
    sent.asker.receive(Answer(one.number, {"n": 1}))
    assert (await first, await second) == ([{"n": 1}], [{"n": 2}])


@pytest.mark.asyncio
async def test_a_worker_that_does_not_answer_is_named_and_its_late_answer_is_dropped() -> None:
    sent = Sent(timeout_s=0.01)
    task = await sent.ask(7)
    with pytest.raises(NoAnswerError, match=r"Worker process 7 did not answer 'stats' within 0\.01 s"):
        await task
    sent.asker.receive(Answer(sent.questions[0][1].number, {}))
    assert sent.asker._waiting == {}


@pytest.mark.asyncio
async def test_a_lost_worker_ends_its_questions_and_no_others() -> None:
    sent = Sent()
    lost, kept = await sent.ask(0), await sent.ask(1)
    sent.asker.lose(0)
    with pytest.raises(EngineClosedError, match="Worker process 0 has ended"):
        await lost
    sent.asker.receive(Answer(sent.questions[1][1].number, {"engine": 1}))
    assert await kept == [{"engine": 1}]


@pytest.mark.asyncio
async def test_the_error_that_a_worker_met_is_raised_here() -> None:
    sent = Sent()
    task = await sent.ask(0)
    sent.asker.receive(Answer(sent.questions[0][1].number, InvalidRequestError("no such question", param="question")))
    with pytest.raises(InvalidRequestError, match="no such question"):
        await task


@pytest.mark.asyncio
async def test_a_viewer_who_leaves_leaves_nothing_behind() -> None:
    sent = Sent()
    task = await sent.ask(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sent.asker._waiting == {}


@pytest.mark.asyncio
async def test_the_client_asks_the_living_workers_and_sorts_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Control:
        def __init__(self) -> None:
            self.items: list[Any] = []

        def put(self, item: Any) -> None:
            self.items.append(item)

    class Facts:
        plan = SimpleNamespace(block_size=16, num_blocks=16)
        info, incarnation = None, 0

    monkeypatch.setattr("pagedcore_adapters._litserve_client.load_text", lambda _: None)
    monkeypatch.setattr("pagedcore_adapters._litserve_client.Front", lambda *_: type("F", (), {"deliver": lambda *_: None})())
    client, controls = WorkerClient(), [Control(), Control(), Control()]
    client.start(4, controls, {0: Facts(), 1: Facts()})  # type: ignore[arg-type, dict-item]  # worker 2 still loads
    client.receive(WorkerLost(0, "exit code 1"))
    task = asyncio.create_task(client.inspect("stats", limit=1))
    await settle()
    sender, question = controls[1].items[0]
    assert (sender.queue_id, question.name, question.arguments) == (4, "stats", {"limit": 1})
    client.receive(Answer(question.number, {"engine": "1"}))
    assert await task == [{"engine": "1"}]
    assert controls[0].items == controls[2].items == []
    task = asyncio.create_task(client.inspect("stats"))
    await settle()
    client.receive(WorkerLost(1, "exit code 1"))
    with pytest.raises(EngineClosedError, match="Worker process 1 has ended"):
        await task
    with pytest.raises(EngineClosedError, match="No worker process can"):
        await client.inspect("stats")


# ---- the worker's side


def test_a_worker_answers_to_the_api_server_that_asked_with_the_content_or_its_error() -> None:
    def inspect(name: str, **arguments: Any) -> list[dict[str, Any]]:
        if name == "weather":
            raise InvalidRequestError("no such question")
        return [{"name": name, **arguments}]

    sent: list[tuple[int, Answer]] = []
    answerer = Answerer(inspect, lambda queue_id, answer: sent.append((queue_id, answer)))
    answerer.take(0, Question(5, "stats", {"limit": 2}))
    answerer.take(1, Question(5, "weather", {}))
    wait_until(lambda: len(sent) == 2, 60, "two answers")
    by_server = dict(sent)
    assert by_server[0] == Answer(5, {"name": "stats", "limit": 2})
    assert isinstance(by_server[1].content, InvalidRequestError)
    answerer.close()


def test_a_slow_answer_does_not_hold_up_the_next(caplog: pytest.LogCaptureFixture) -> None:
    gate, sent = threading.Event(), list[Answer]()

    def inspect(name: str) -> list[dict[str, Any]]:
        if name == "advice":
            assert gate.wait(60.0)
        return [{"name": name}]

    answerer = Answerer(inspect, lambda _, answer: sent.append(answer))
    answerer.take(0, Question(1, "advice", {}))
    answerer.take(0, Question(2, "stats", {}))
    wait_until(lambda: sent, 60, "the quick answer")
    assert [answer.number for answer in sent] == [2]
    gate.set()
    wait_until(lambda: len(sent) == 2, 60, "the slow answer")
    answerer.close()


def test_a_fault_while_answering_is_logged_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Answer] = []

    def inspect(name: str) -> list[dict[str, Any]]:
        return [{"value": 1 / len(name)}]

    answerer = Answerer(inspect, lambda _, answer: sent.append(answer))
    answerer.take(0, Question(1, "", {}))
    answerer.take(0, Question(2, "ab", {}))
    wait_until(lambda: sent and "A question was not answered" in caplog.text, 60, "a log line and the second answer")
    assert sent == [Answer(2, {"value": 0.5})]
    answerer.close()


def test_nobody_listening_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    tried = threading.Event()

    def send(queue_id: int, answer: Answer) -> None:
        tried.set()
        raise BrokenPipeError

    answerer = Answerer(lambda _: [{}], send)
    answerer.take(0, Question(1, "stats", {}))
    assert tried.wait(60.0)
    answerer._threads.shutdown(wait=True)
    assert "not answered" not in caplog.text
