"""Clients choose their request ids without knowing of each other, and never meet in the engine."""

from __future__ import annotations

import pytest

from pagedcore.errors import InvalidRequestError
from pagedcore.messages import RequestUpdate
from pagedcore.remote.request_ids import MAX_REMEMBERED, ClientIds, EngineIds
from support.core_builders import make_request


def last(request_id: str) -> RequestUpdate:
    return RequestUpdate(request_id, [], finish_reason="stop", status="completed")


def end(ids: ClientIds, engine_id: str) -> str:
    update = last(engine_id)
    ids.translate([update])
    return update.request_id


def test_an_id_that_nobody_else_has_stays_as_it_is() -> None:
    ids = ClientIds(EngineIds())
    request = make_request("a", [1])
    assert ids.open(request) is request
    assert (ids.engine_id("a"), ids.known_as("a"), ids.open_ids()) == ("a", "a", ["a"])
    assert end(ids, "a") == "a"
    assert (ids.engine_id("a"), ids.open_ids()) == (None, [])


def test_the_second_of_two_clients_gets_another_id_in_the_engine_and_hears_of_its_own() -> None:
    engine = EngineIds()
    one, other = ClientIds(engine), ClientIds(engine)
    one.open(make_request("a", [1]))
    opened = other.open(make_request("a", [2]))
    assert opened.request_id != "a"
    assert opened.group_id == opened.request_id
    assert opened.prompt_token_ids == [2]
    assert (one.engine_id("a"), other.engine_id("a")) == ("a", opened.request_id)
    update = RequestUpdate(opened.request_id, [5])
    other.translate([update])
    assert update.request_id == "a"
    assert end(other, opened.request_id) == "a"
    assert end(one, "a") == "a"


def test_choices_of_one_request_keep_one_group_also_when_the_first_has_ended() -> None:
    engine = EngineIds()
    one, other = ClientIds(engine), ClientIds(engine)
    one.open(make_request("a", [1]))
    one.open(make_request("a#1", [1], group_id="a"))
    end(one, "a")
    first = other.open(make_request("a", [1]))
    second = other.open(make_request("a#1", [1], group_id="a"))
    assert first.group_id == second.group_id == first.request_id != "a"
    assert second.request_id == "a#1" + first.request_id.removeprefix("a")
    end(one, "a#1")
    third = ClientIds(engine)
    assert third.open(make_request("a", [1])).request_id == "a", "the id is free once both choices have ended"


def test_an_id_is_free_again_after_the_last_update() -> None:
    engine = EngineIds()
    one, other = ClientIds(engine), ClientIds(engine)
    one.open(make_request("a", [1]))
    end(one, "a")
    assert other.open(make_request("a", [1])).request_id == "a"


def test_one_client_cannot_have_an_id_twice() -> None:
    ids = ClientIds(EngineIds())
    ids.open(make_request("a", [1]))
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use") as caught:
        ids.open(make_request("a", [2]))
    assert caught.value.param == "request_id"
    assert ids.open_ids() == ["a"]


def test_a_client_may_ask_about_an_ended_request_by_its_own_id() -> None:
    engine = EngineIds()
    one, other = ClientIds(engine), ClientIds(engine)
    one.open(make_request("a", [1]))
    renamed = other.open(make_request("a", [1])).request_id
    end(other, renamed)
    assert (one.known_as("a"), other.known_as("a"), other.known_as("b")) == ("a", renamed, "b")
    again = other.open(make_request("a", [1])).request_id
    assert other.known_as("a") == again != renamed


def test_what_is_remembered_of_ended_requests_is_bounded() -> None:
    engine = EngineIds()
    one, other = ClientIds(engine), ClientIds(engine)
    for number in range(MAX_REMEMBERED + 5):
        one.open(make_request(str(number), [1]))
        end(other, other.open(make_request(str(number), [1])).request_id)
    assert other.known_as("4") == "4"
    assert other.known_as("5") != "5"
    assert not other._renamed
    assert not other.open_ids()


def test_updates_of_unknown_requests_change_nothing() -> None:
    ids = ClientIds(EngineIds())
    assert end(ids, "unknown") == "unknown"
    assert ids.open_ids() == []


@pytest.mark.parametrize(("first", "second"), [("x#1", "x"), ("x", "x#1"), ("x#1", "x#1")])
def test_ids_of_choices_do_not_meet_ids_that_look_like_them(first: str, second: str) -> None:
    engine = EngineIds()
    one, other = ClientIds(engine), ClientIds(engine)
    assert one.open(make_request(first, [1, 2])).request_id == first
    assert other.open(make_request(second, [1, 2])).request_id.startswith(f"{second}~")


def test_a_client_that_is_alone_keeps_all_its_ids_also_those_that_look_like_choices_of_its_own() -> None:
    engine = EngineIds()
    ids = ClientIds(engine)
    for name in ("x#1", "x", "x#1#2"):
        assert ids.open(make_request(name, [1])).request_id == name
    with pytest.raises(InvalidRequestError, match="'x#1' is in use"):
        ids.open(make_request("x#1", [1], group_id="x"))
    for name in ("x#1", "x", "x#1#2"):
        end(ids, name)
    assert engine.groups == {}
