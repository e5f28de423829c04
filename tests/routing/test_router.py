"""Who gets a request: affinity, its bound, and why."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.errors import ConfigError
from pagedcore.routing.prefix_keys import PrefixKey
from pagedcore.routing.router import Choice, Router, RoutingPolicy


def key_list(*numbers: int) -> list[PrefixKey]:
    return [PrefixKey(number) for number in numbers]


def make_router(num_workers: int = 2, **policy: float) -> Router:
    return Router(num_workers, 1000, RoutingPolicy(**policy))  # type: ignore[arg-type]


def fill(router: Router, worker_id: int, number: int) -> None:
    for _ in range(number):
        router.take(worker_id)


def test_a_prompt_goes_to_the_worker_that_knows_most_of_it() -> None:
    router = make_router(3)
    router.learn(0, key_list(1))
    router.learn(2, key_list(1, 2))
    router.take(2)
    assert router.place(key_list(1, 2, 3), [0, 1, 2]) == Choice(worker_id=2, reason="prefix", num_known_blocks=2)
    assert router.place(key_list(1, 2, 3), [0, 1, 2]) == Choice(worker_id=2, reason="prefix", num_known_blocks=3)


def test_a_prompt_that_nobody_knows_goes_to_the_worker_with_least_to_do() -> None:
    router = make_router(3)
    fill(router, 0, 2)
    fill(router, 1, 1)
    fill(router, 2, 2)
    assert router.place(key_list(1), [0, 1, 2]) == Choice(worker_id=1, reason="load")
    assert [router.load(one) for one in range(3)] == [2, 2, 2]


def test_workers_that_know_as_much_share_by_load() -> None:
    router = make_router()
    router.learn(0, key_list(1, 2))
    router.learn(1, key_list(1, 2))
    router.take(0)
    assert router.place(key_list(1, 2), [0, 1]).worker_id == 1


def test_a_worker_with_too_much_to_do_gives_way_to_the_next_that_knows_something() -> None:
    router = make_router(3, max_load_factor=1.5, free_load=1)
    router.learn(0, key_list(1, 2, 3))
    router.learn(2, key_list(1))
    fill(router, 0, 3)
    fill(router, 1, 1)
    fill(router, 2, 2)
    assert router.place(key_list(1, 2, 3), [0, 1, 2]).worker_id == 0  # the limit is ceil(1.5 * 7 / 3) = 4
    assert router.place(key_list(1, 2, 3), [0, 1, 2]) == Choice(worker_id=2, reason="overload", num_known_blocks=1)
    assert router.place(key_list(1, 2, 3), [0, 1, 2]) == Choice(worker_id=2, reason="prefix", num_known_blocks=3)  # it has them now, too


def test_a_few_requests_overload_nobody() -> None:
    router = make_router(4, max_load_factor=1.0, free_load=3)
    places = [router.place(key_list(1), [0, 1, 2, 3]) for _ in range(4)]
    assert len({place.worker_id for place in places[:3]}) == 1
    assert [place.reason for place in places] == ["load", "prefix", "prefix", "overload"]


def test_a_worker_that_is_not_usable_gets_nothing_and_a_lone_one_everything() -> None:
    router = make_router(3, free_load=1)
    router.learn(0, key_list(1))
    assert router.place(key_list(1), [1, 2]).worker_id in (1, 2)
    fill(router, 1, 50)
    assert router.place(key_list(1), [1]) == Choice(worker_id=1, reason="only")
    assert router.place(key_list(1), [0, 1]).reason == "prefix"


def test_what_a_lone_worker_was_given_is_known_once_there_are_others() -> None:
    router = make_router()
    router.place(key_list(1, 2), [1])
    assert router.place(key_list(1, 2), [0, 1]) == Choice(worker_id=1, reason="prefix", num_known_blocks=2)


def test_a_worker_that_starts_anew_has_nothing_cached() -> None:
    router = make_router()
    router.learn(0, key_list(1))
    router.forget(0)
    router.take(0)
    assert router.place(key_list(1), [0, 1]) == Choice(worker_id=1, reason="load")


def test_loads_of_other_routers_count_as_they_are_last_told() -> None:
    router = make_router()
    router.note_peer(7, [3, 0])
    router.note_peer(8, [1, 0])
    assert router.place([], [0, 1]).worker_id == 1
    router.note_peer(7, [0, 0])
    router.note_peer(8, [0, 0])
    assert [router.load(0), router.load(1)] == [0, 1]
    assert router.own_loads == [0, 1]
    router.release(1)
    assert router.own_loads == [0, 0]


def test_idle_routers_that_know_nothing_of_each_other_agree_and_use_all_workers() -> None:
    chosen = Counter()
    for prompt in range(200):
        places = {make_router(4).place(key_list(prompt), [0, 1, 2, 3]).worker_id for _ in range(2)}
        (worker_id,) = places
        chosen[worker_id] += 1
    assert len(chosen) == 4
    assert max(chosen.values()) < 100


def test_a_preference_outlives_the_loss_of_another_worker() -> None:
    for prompt in range(50):
        preferred = make_router(4).place(key_list(prompt), [0, 1, 2, 3]).worker_id
        others = [one for one in range(4) if one != (preferred + 1) % 4]
        assert make_router(4).place(key_list(prompt), others).worker_id == preferred


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_load_factor": 0.9}, "max_load_factor is 0.9"),
        ({"max_load_factor": float("inf")}, "inf"),
        ({"free_load": 0}, "free_load is 0"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingPolicy(**options)  # type: ignore[arg-type]


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.booleans()), max_size=120)


@given(steps, st.integers(2, 5), st.floats(1.0, 3.0), st.integers(1, 6))
def test_no_worker_ever_gets_a_request_beyond_the_limit(
    traffic: list[tuple[int, int, bool]], num_workers: int, factor: float, free_load: int
) -> None:
    policy = RoutingPolicy(max_load_factor=factor, free_load=free_load)
    router, workers, open_requests = Router(num_workers, 50, policy), list(range(num_workers)), []
    for family, length, ends_one in traffic:
        prompt = key_list(*(10 * family + index for index in range(length)))
        num_open = sum(router.own_loads)
        choice = router.place(prompt, workers)
        open_requests.append(choice.worker_id)
        assert router.load(choice.worker_id) <= policy.load_limit(num_open + 1, num_workers)
        if ends_one:
            router.release(open_requests.pop(0))
    assert router.own_loads == [open_requests.count(one) for one in workers]
