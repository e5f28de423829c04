"""Who stands in line and who is held back: exact lines, and a plain model of the rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pagedcore.tenancy.tenant_queue import TenantQueue


@dataclass(eq=False)
class Ticket:
    """A request of the tenant of its first letter."""

    request_id: str
    order_key: tuple[int, int]

    @property
    def tenant(self) -> str:
        return self.request_id[0]


def tickets(*names: str) -> list[Ticket]:
    return [Ticket(name, (0, number)) for number, name in enumerate(names)]


def make_queue(max_running: int | None, *names: str) -> tuple[TenantQueue[Ticket], dict[str, Ticket]]:
    queue: TenantQueue[Ticket] = TenantQueue(max_running)
    found = {ticket.request_id: ticket for ticket in tickets(*names)}
    for ticket in found.values():
        queue.add(ticket)
    return queue, found


def line(queue: TenantQueue[Ticket]) -> list[str]:
    return [ticket.request_id for ticket in queue.line]


def moves(queue: TenantQueue[Ticket]) -> list[tuple[str, bool]]:
    return [(ticket.request_id, is_held) for ticket, is_held in queue.settle()]


def test_the_first_requests_of_each_tenant_stand_in_line_as_many_as_it_has_rows() -> None:
    queue, _ = make_queue(2, "a0", "a1", "a2", "b0", "a3")
    assert moves(queue) == [("a3", True), ("a2", True)]
    assert (line(queue), len(queue), queue.num_held) == (["a0", "a1", "b0"], 5, 2)
    assert sorted(ticket.request_id for ticket in queue) == ["a0", "a1", "a2", "a3", "b0"]


def test_what_starts_takes_its_place_in_the_quota_with_it_and_what_stops_lets_the_next_in() -> None:
    queue, found = make_queue(2, "a0", "a1", "a2", "b0", "a3")
    queue.settle()
    queue.start(found["a0"])
    queue.start(found["b0"])
    assert (moves(queue), line(queue)) == ([], ["a1"])
    queue.check_invariants(Counter("ab"))
    queue.stop(found["a0"])
    assert (moves(queue), line(queue)) == ([("a2", False)], ["a1", "a2"])
    queue.remove(found["a3"])
    queue.remove(found["a1"])
    assert (moves(queue), line(queue), len(queue)) == ([], ["a2"], 1)


def test_a_preempted_request_stands_where_it_stood_and_holds_back_nobody_new() -> None:
    queue, found = make_queue(1, "a0", "a1", "b0")
    queue.settle()
    queue.start(found["a0"])
    queue.settle()
    queue.stop(found["a0"])
    queue.add(found["a0"])
    assert (moves(queue), line(queue), queue.num_held) == ([], ["a0", "b0"], 1)


def test_a_request_of_an_earlier_class_takes_the_place_of_a_later_one() -> None:
    queue, _ = make_queue(1, "a0", "a1")
    queue.settle()
    queue.add(Ticket("a-first", (-1, 9)))
    assert (moves(queue), line(queue)) == ([("a0", True)], ["a-first"])


def test_a_later_arrival_does_not_take_the_row_for_which_an_earlier_one_is_held_back() -> None:
    queue, found = make_queue(1, "a0", "a1")
    queue.settle()
    queue.start(found["a0"])
    queue.settle()
    queue.stop(found["a0"])
    queue.add(Ticket("a9", (0, 9)))
    assert (moves(queue), line(queue)) == ([("a9", True), ("a1", False)], ["a1"])


def test_without_a_quota_nobody_is_held_back() -> None:
    queue, found = make_queue(None, "a0", "a1", "a2")
    queue.start(found["a0"])
    assert (moves(queue), line(queue), queue.num_held) == ([], ["a1", "a2"], 0)
    queue.stop(found["a0"])
    queue.check_invariants(Counter())


def test_tenants_of_whom_nothing_is_left_are_forgotten() -> None:
    queue, found = make_queue(1, "a0", "b0")
    for ticket in found.values():
        queue.start(ticket)
        queue.stop(ticket)
    queue.settle()
    assert not queue._tenants


def test_those_that_have_just_come_and_find_a_row_are_not_held_up() -> None:
    queue, _ = make_queue(2, "a0", "a1", "a2", "b0")
    assert [queue.num_held_up(rows) for rows in (0, 1, 9)] == [4, 3, 0]
    assert [queue.num_held_up_of("a", rows) for rows in (0, 1, 9)] == [3, 2, 1]  # two rows are left by the quota
    assert queue.num_held_up_of("c", 0) == 0
    queue.settle()
    assert (queue.num_held_up(9), queue.num_held_up_of("a", 9), queue.num_held_up_of("b", 9)) == (4, 3, 1)


@given(st.data(), st.integers(1, 3))
def test_after_each_settling_the_line_holds_the_first_of_each_tenant_and_nobody_else(data: st.DataObject, max_running: int) -> None:
    queue: TenantQueue[Ticket] = TenantQueue(max_running)
    waiting, running = list[Ticket](), list[Ticket]()
    for number in range(data.draw(st.integers(0, 40))):
        act = data.draw(st.sampled_from(("add", "add", "start", "stop", "abort", "preempt", "settle")))
        if act == "add":
            waiting.append(Ticket(f"{data.draw(st.sampled_from('abc'))}{number}", (data.draw(st.integers(0, 2)), number)))
            queue.add(waiting[-1])
        elif act == "abort" and waiting:
            queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        elif act in ("stop", "preempt") and running:
            running_one = running.pop(data.draw(st.integers(0, len(running) - 1)))
            queue.stop(running_one)
            if act == "preempt":
                waiting.append(running_one)
                queue.add(running_one)
        elif act in ("settle", "start"):
            _settle(queue, waiting, running, max_running)
            if act == "start" and len(queue.line):
                running.append(queue.line[data.draw(st.integers(0, len(queue.line) - 1))])
                queue.start(running[-1])
                waiting.remove(running[-1])
        queue.check_invariants(Counter(ticket.tenant for ticket in running))
        assert set(queue) == set(waiting)
        assert len(queue) == len(waiting) == len(queue.line) + queue.num_held


def _settle(queue: TenantQueue[Ticket], waiting: list[Ticket], running: list[Ticket], max_running: int) -> None:
    was_held = {ticket: ticket not in set(queue.line) for ticket in waiting}
    was_held |= dict(queue.settle())
    rows_left = {tenant: max_running - sum(ticket.tenant == tenant for ticket in running) for tenant in "abc"}
    expected = []
    for ticket in sorted(waiting, key=lambda ticket: ticket.order_key):
        rows_left[ticket.tenant] -= 1
        if rows_left[ticket.tenant] >= 0:
            expected.append(ticket)
    assert list(queue.line) == expected
    assert {ticket for ticket, is_held in was_held.items() if is_held} == set(waiting) - set(expected)
