"""What each request waited for, and how long: exact, without a look at every waiting request in every step."""

from __future__ import annotations

from pagedcore.tracing.life import NEXT_STEP, Life, Wait

MAX_CLOCKS = 64
"""Priority classes that have a clock of their own; requests behind one of the others wait for what stopped the queue."""

ClockKey = tuple[int | None, str]
"""Priority class of the request at which the queue stood still, and why it did."""


class QueueClocks:
    """Owns how long the waiting queue has stood still, by what for.

    A plan takes requests from the queue until something stops it. From then to the next plan, all behind that point wait
    for the same thing, so a clock a reason is enough: each has waited as long as the clocks went on meanwhile.
    """

    def __init__(self) -> None:
        self._seconds: dict[ClockKey, float] = {}
        self._running: ClockKey | None = None
        self._since_s = 0.0

    def turn(self, now_s: float, key: ClockKey | None) -> None:
        """From now on the queue stands still for this; None: nobody stands in it."""
        if key is not None and key not in self._seconds and len(self._seconds) >= MAX_CLOCKS:
            key = (None, key[1])
        if key == self._running:
            return
        if self._running is not None:
            self._seconds[self._running] = self._seconds.get(self._running, 0.0) + now_s - self._since_s
        self._running, self._since_s = key, now_s

    def read(self, now_s: float) -> dict[ClockKey, float]:
        """Seconds on each clock."""
        seconds = dict(self._seconds)
        if self._running is not None:
            seconds[self._running] = seconds.get(self._running, 0.0) + now_s - self._since_s
        return seconds


class WaitBook:
    """Owns the clocks of the queue and the requests that no plan has looked at yet; writes `wait` and `waited_s` of lives.

    The seconds of one life sum up to its time from arrival to admission and from each preemption to the next admission.
    """

    def __init__(self) -> None:
        self._clocks = QueueClocks()
        self._unseen: dict[Life, None] = {}

    def begin(self, life: Life) -> None:
        """It waits for a plan to look at it."""
        self._unseen[life] = None

    def pass_over(self, life: Life, now_s: float, reason: str | None) -> None:
        """A plan went on to others: from now on it waits for this; None: it is among the others again, for a plan that is being made."""
        self._count(life, now_s)
        life.wait = Wait(now_s, reason or NEXT_STEP)
        if reason is None:
            self._unseen[life] = None

    def end(self, life: Life, now_s: float) -> None:
        """It waits no more; nothing changes for one that did not wait."""
        self._unseen.pop(life, None)
        if life.wait is not None:
            self._count(life, now_s)
            life.wait = None

    def plan(self, now_s: float, key: ClockKey | None) -> None:
        """A plan looked at the queue, which from now on stands still for `key`; who is left waits for that."""
        self._clocks.turn(now_s, key)
        for life in self._unseen:
            if life.wait is not None and life.wait.reason == NEXT_STEP:
                self._count(life, now_s)
                life.wait = Wait(now_s, None, self._clocks.read(now_s))
        self._unseen.clear()

    def waited_s(self, life: Life, now_s: float) -> dict[str, float]:
        """Reason -> seconds until now; changes nothing."""
        waited = dict(life.waited_s)
        for reason, seconds in self._open_parts(life, now_s):
            waited[reason] = waited.get(reason, 0.0) + seconds
        return waited

    def _count(self, life: Life, now_s: float) -> None:
        life.waited_s = self.waited_s(life, now_s)

    def _open_parts(self, life: Life, now_s: float) -> list[tuple[str, float]]:
        wait = life.wait
        if wait is None:
            return []
        if wait.reason is not None:
            parts = [(wait.reason, now_s - wait.since_s)]
        else:
            passed = ((key, seconds - wait.mark.get(key, 0.0)) for key, seconds in self._clocks.read(now_s).items())
            parts = [(_reason(key, life.request.priority), seconds) for key, seconds in passed]
        return [(reason, seconds) for reason, seconds in parts if seconds > 0.0]


def _reason(key: ClockKey, priority: int) -> str:
    """Why a request of this class waits while the queue stands still at that one."""
    stop_priority, reason = key
    return "priority" if stop_priority is not None and priority > stop_priority else reason
