"""Whatever goes through the socket arrives as it was: every field of every message, and every error."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore import errors
from pagedcore.advice.advice import Advice
from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig
from pagedcore.errors import EngineClosedError, EngineError, InvalidRequestError, PagedCoreError, QueueFullError
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outputs import CacheReport, Logprob, RequestTimings
from pagedcore.remote.channel import Packer
from pagedcore.remote.faults import engine_error_of, error_of, fault_of
from pagedcore.remote.frames import (
    Add,
    Facts,
    Refusal,
    Updates,
    Welcome,
    decode_from_engine,
    decode_from_front,
    encode,
    from_wire,
    protocol,
    to_wire,
)
from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_outputs import StructuredOutputsParams
from support.engine_builder import make_plan

INTS = st.integers(-(2**63), 2**64 - 1)
COUNTS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {int: INTS, float: FLOATS, str: st.text(), bool: st.booleans(), type(None): st.none()}
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PagedCoreError)]


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotated type that a frame can hold."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if dataclasses.is_dataclass(hint):
        return made(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(any_of, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(any_of, arguments))
    if origin in (dict, Mapping):
        return st.dictionaries(any_of(arguments[0]), any_of(arguments[1]), max_size=3)
    return st.lists(any_of(arguments[0]), max_size=3).map(origin)


def fields_of(cls: type, **known: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Any value of its type for each field of a dataclass, so that a field which is added later is tried, too."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: known[name] if name in known else any_of(hints[name]) for name in names}


def made(cls: type, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(fields_of(cls, **known)).map(lambda values: cls(**values))


FORMS = st.one_of(
    st.text(min_size=1).filter(str.strip).map(lambda text: StructuredOutputsParams(regex=text)),
    st.lists(st.text(min_size=1), min_size=1).map(lambda texts: StructuredOutputsParams(choice=texts)),
    st.just(StructuredOutputsParams(json={"b": {}, "a": [1.5, None]}, disable_any_whitespace=True)),
    st.just(StructuredOutputsParams(json_object=True, field="response_format")),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(9, 2**40),
    min_tokens=st.integers(0, 9),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(COUNTS, max_size=3),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    bad_words=st.lists(st.text(min_size=1).filter(str.strip), max_size=3),
    logit_bias=st.dictionaries(COUNTS, st.floats(-100, 100), max_size=3),
    repetition_penalty=st.floats(0.001, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    structured_outputs=st.none() | FORMS,
)
LOGPROBS = st.dictionaries(COUNTS, st.builds(Logprob, FLOATS, COUNTS, st.none() | st.text()), max_size=3)


@settings(max_examples=60, deadline=None)
@given(made(AddRequest, params=PARAMS))
def test_a_request_arrives_with_every_field(request: AddRequest) -> None:
    frame = decode_from_front(encode(Add(request)))
    assert isinstance(frame, Add)
    assert frame.request == request
    assert frame.request.params.logit_bias == request.params.logit_bias
    if request.params.structured_outputs is not None:
        assert frame.request.params.structured_outputs.field == request.params.structured_outputs.field


UPDATE_FACTS = fields_of(
    RequestUpdate,
    new_logprobs=st.none() | st.lists(LOGPROBS, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=3),
    error=st.none(),
    cache=st.none() | made(CacheReport),
    timings=st.none() | made(RequestTimings),
)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({"request_id": UPDATE_FACTS.pop("request_id"), "new_token_ids": UPDATE_FACTS.pop("new_token_ids")}),
       st.fixed_dictionaries({}, optional=UPDATE_FACTS))  # fmt: skip
def test_an_update_arrives_with_every_field(tokens: dict[str, Any], facts: dict[str, Any]) -> None:
    update = RequestUpdate(**tokens, **facts)
    (frame,) = map(decode_from_engine, Packer()([[update]]))
    assert isinstance(frame, Updates)
    assert [from_wire(item) for item in frame.items] == [update]


def test_an_update_of_a_token_is_an_id_and_a_token() -> None:
    assert len(encode(to_wire(RequestUpdate("request-id", [5])))) == len("request-id") + 5
    assert from_wire(to_wire(RequestUpdate("r", [5]))).__dict__ == {"request_id": "r", "new_token_ids": [5]}


def test_updates_that_pile_up_share_a_frame_and_keep_their_order() -> None:
    answer = Refusal(fault_of(EngineError("x")))
    steps = [[RequestUpdate("a", [1]), RequestUpdate("b", [2])], [RequestUpdate("a", [3])], answer, [RequestUpdate("b", [4])]]
    packer = Packer()
    first, second, third = map(decode_from_engine, packer(steps))
    assert [(item.request_id, item.new_token_ids) for item in first.items] == [("a", [1]), ("b", [2]), ("a", [3])]
    assert second == answer
    assert [item.new_token_ids for item in third.items] == [[4]]
    assert packer.num_packed == 4


def test_a_plan_and_what_the_model_is_arrive() -> None:
    plan = make_plan(served_model_name=["a", "b"], max_model_len=99)
    info = ModelInfo(model_names=("a", "b"), max_model_len=9, created_s=3, vocab_size=7, eos_token_ids=frozenset({1, 2}), seed=4)
    frame = decode_from_engine(encode(Welcome(plan, info, "engine", 5)))
    assert isinstance(frame, Welcome)
    assert (frame.plan, frame.info, frame.engine, frame.pid) == (plan, info, "engine", 5)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(
            served_model_name="a", max_model_len=7, overlap=True, request_log_sample=0.5, request_log="-", chat_template="{{ x }}"
        ),
    ],
)
def test_a_config_arrives(config: EngineConfig) -> None:
    assert msgspec.msgpack.decode(encode(config), type=EngineConfig) == config


@settings(max_examples=20, deadline=None)
@given(made(StatsSnapshot))
def test_stats_arrive(stats: StatsSnapshot) -> None:
    assert msgspec.msgpack.decode(encode(stats), type=StatsSnapshot) == stats


@settings(max_examples=20, deadline=None)
@given(made(Advice))
def test_advice_arrives(advice: Advice) -> None:
    assert msgspec.msgpack.decode(encode(advice), type=Advice) == advice


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_its_own_kind(kind: type[PagedCoreError]) -> None:
    other = error_of(fault_of(kind("What is wrong.")))
    assert type(other) is kind
    assert (str(other), other.http_status, other.code) == ("What is wrong.", kind.http_status, kind.code)


def test_errors_keep_what_was_given_by_keyword() -> None:
    update = RequestUpdate("a", [], finish_reason="error", status="rejected", error=InvalidRequestError("No.", param="top_p", code="mine"))
    (item,) = decode_from_engine(encode(Updates([to_wire(update)]))).items
    error = from_wire(item).error
    assert isinstance(error, InvalidRequestError)
    assert (str(error), error.param, error.code) == ("No.", "top_p", "mine")
    assert error_of(fault_of(QueueFullError("Full.", retry_after_s=2.5))).retry_after_s == 2.5
    assert error_of(fault_of(EngineClosedError("Closed.", retry_after_s=7.0))).retry_after_s == 7.0


def test_other_errors_arrive_as_engine_errors_but_for_failed_checks() -> None:
    assert type(error_of(fault_of(AssertionError("books")))) is AssertionError
    error = error_of(fault_of(KeyError("x")))
    assert (type(error), str(error)) == (EngineError, "KeyError: 'x'")
    unknown = dataclasses.replace  # no error of ours, though a name that Python knows
    fault = fault_of(EngineError("x"))
    fault.kind = unknown.__name__
    assert type(engine_error_of(fault)) is EngineError
    fault.kind = "annotations"  # a name in the module that is no class
    assert type(engine_error_of(fault)) is EngineError


def test_facts_name_all_that_an_update_may_hold() -> None:
    assert {"request_id", "new_token_ids", *Facts.__struct_fields__} == set(RequestUpdate.__annotations__)


def test_nothing_that_is_decoded_runs_code_and_junk_is_refused() -> None:
    import pickle  # noqa: TID251  what must not be understood

    for junk in (pickle.dumps(AddRequest), b"", b"\x93\xa5Hello", encode({"request_id": "a"}), encode(["Add", 3])):
        with pytest.raises(msgspec.MsgspecError):
            decode_from_front(junk)


def test_the_protocol_follows_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    before = protocol()
    assert before == protocol()

    @dataclasses.dataclass(frozen=True)
    class AddRequestOfTomorrow(AddRequest):
        another: int = 0

    AddRequestOfTomorrow.__name__ = "AddRequest"
    from pagedcore.remote import frames

    monkeypatch.setattr(frames, "_TRAVELLERS", (AddRequestOfTomorrow, *frames._TRAVELLERS[1:]))
    assert protocol() != before
