"""What goes between processes survives pickling, and hashing of what is used as a key."""

from __future__ import annotations

import pickle  # noqa: TID251  the question is whether it survives

import pytest

from pagedcore import errors
from pagedcore.config import EngineConfig
from pagedcore.engine_args import AsyncEngineArgs
from pagedcore.errors import EngineClosedError, InvalidRequestError, PagedCoreError, QueueFullError, RequestError
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, RequestUpdate
from pagedcore.outputs import CacheReport, CompletionOutput, Logprob, RequestOutput, RequestTimings
from pagedcore.sampling_params import SamplingParams

LEAVES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PagedCoreError)]


def copied(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_kind_message_and_code(kind: type[PagedCoreError]) -> None:
    error = kind("What is wrong.")
    other = copied(error)
    assert type(other) is kind
    assert str(other) == "What is wrong."
    assert (other.http_status, other.openai_type, other.code) == (error.http_status, error.openai_type, error.code)


def test_errors_keep_what_was_given_by_keyword() -> None:
    invalid = copied(InvalidRequestError("Wrong.", param="top_p", code="my_code"))
    assert isinstance(invalid, InvalidRequestError)
    assert (invalid.param, invalid.code, str(invalid)) == ("top_p", "my_code", "Wrong.")
    full = copied(QueueFullError("Full.", retry_after_s=2.5))
    assert isinstance(full, QueueFullError)
    assert (full.retry_after_s, full.param, full.code) == (2.5, None, "queue_full")
    closed = copied(EngineClosedError("Closed.", retry_after_s=7.0))
    assert isinstance(closed, EngineClosedError)
    assert closed.retry_after_s == 7.0


def test_a_code_of_one_error_is_not_every_errors_code() -> None:
    InvalidRequestError("Wrong.", code="mine")
    assert RequestError("Wrong.").code is None
    assert InvalidRequestError("Wrong.").code == "invalid_value"


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(
            request_id="a", group_id="a", prompt_token_ids=[1], params=SamplingParams(stop=["x"], logit_bias={1: 2.0}), arrival_s=1.0
        ),
        AbortRequest("a"),
        FinishRequest("a", 3, "stop"),
        RequestUpdate("a", [1]),
        RequestUpdate(
            "a",
            [1],
            new_logprobs=[{1: Logprob(-0.5, 1)}],
            finish_reason="stop",
            status="completed",
            cache=CacheReport(3),
            timings=RequestTimings(1.0),
        ),
        RequestOutput("a", "p", [1], [CompletionOutput(0, "t", [2])], finished=True, status="completed", cache=CacheReport(1)),
        EngineConfig(served_model_name=["a", "b"], max_num_seqs=3),
        AsyncEngineArgs("m", max_num_seqs=3),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_and_configs_are_equal_after_the_way(message: object) -> None:
    assert copied(message) == message


def test_an_update_carries_its_error() -> None:
    update = copied(RequestUpdate("a", [], finish_reason="error", status="rejected", error=QueueFullError("Full.", retry_after_s=3.0)))
    assert isinstance(update, RequestUpdate)
    assert isinstance(update.error, QueueFullError)
    assert (update.status, update.error.retry_after_s) == ("rejected", 3.0)


def test_an_update_of_one_token_carries_nothing_else() -> None:
    update = RequestUpdate("a", [1])
    assert vars(update) == {"request_id": "a", "new_token_ids": [1]}
    assert (update.status, update.finish_reason, update.cache, update.num_preemptions) == ("running", None, None, 0)
    assert update == RequestUpdate(request_id="a", new_token_ids=[1], status="running")
    assert update != RequestUpdate("a", [1], finish_reason="stop")
    with pytest.raises(TypeError, match="finish_raeson"):
        RequestUpdate("a", [1], finish_raeson="stop")


def test_a_config_is_a_key() -> None:
    assert len({EngineConfig(served_model_name=["a"]), EngineConfig(served_model_name=("a",)), EngineConfig()}) == 2
