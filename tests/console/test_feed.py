"""One producer for all viewers, none while nobody looks, and streams that end."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing

import pytest

from pagedcore.console.feed import Feed


class Source:
    """Numbers its events. With `end_after`, the engine is gone after so many."""

    def __init__(self, end_after: int | None = None) -> None:
        self.num_asked = 0
        self._end_after = end_after

    async def __call__(self) -> bytes | None:
        if self.num_asked == self._end_after:
            return None
        self.num_asked += 1
        return str(self.num_asked).encode()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_nothing_is_asked_before_the_first_viewer_and_after_the_last() -> None:
    source = Source()
    feed = Feed(source, interval_s=0.0)
    await settle()
    assert (source.num_asked, feed.is_running) == (0, False)
    async with aclosing(feed.events()) as events:
        assert [await anext(events) for _ in range(3)] != []
        assert feed.is_running
    num_asked = source.num_asked
    await settle()
    assert (source.num_asked, feed.is_running) == (num_asked, False)


@pytest.mark.asyncio
async def test_viewers_share_one_producer_and_a_later_one_sees_the_latest_event_at_once() -> None:
    source = Source()
    feed = Feed(source, interval_s=3600.0)
    async with aclosing(feed.events()) as first, aclosing(feed.events()) as second:
        assert await anext(first) == b"1"
        assert await anext(second) == b"1"
        assert source.num_asked == 1


@pytest.mark.asyncio
async def test_the_producer_goes_on_while_one_of_two_viewers_is_left() -> None:
    feed = Feed(Source(), interval_s=0.0)
    async with aclosing(feed.events()) as first:
        await anext(first)
        async with aclosing(feed.events()) as second:
            await anext(second)
        assert feed.is_running
        assert int(await anext(first)) > 1


@pytest.mark.asyncio
async def test_a_slow_viewer_gets_the_newest_event_and_no_backlog() -> None:
    source = Source()
    feed = Feed(source, interval_s=0.0)
    async with aclosing(feed.events()) as events:
        await anext(events)
        await settle()
        newest = source.num_asked
        assert newest > 3
        assert int(await anext(events)) >= newest


@pytest.mark.asyncio
async def test_all_streams_end_when_the_engine_is_gone() -> None:
    feed = Feed(Source(end_after=1), interval_s=0.0)

    async def watch() -> list[bytes]:
        async with aclosing(feed.events()) as events:
            return [event async for event in events]

    seen = await asyncio.wait_for(asyncio.gather(watch(), watch()), 60)
    assert all(events in ([], [b"1"]) for events in seen)
    assert not feed.is_running


@pytest.mark.asyncio
async def test_who_comes_after_the_engine_has_gone_is_told_too() -> None:
    feed = Feed(Source(end_after=0), interval_s=0.0)
    async with aclosing(feed.events()) as earlier:
        assert await asyncio.wait_for(anext(earlier, None), 60) is None
        async with aclosing(feed.events()) as later:
            assert await asyncio.wait_for(anext(later, None), 60) is None


@pytest.mark.asyncio
async def test_a_stream_ends_in_time_for_a_server_that_shuts_down() -> None:
    ticks = itertools.count(0.0, 7.0)
    feed = Feed(Source(), interval_s=0.0, max_stream_s=20.0, clock=lambda: next(ticks))
    async with aclosing(feed.events()) as events:
        assert len([event async for event in events]) == 2  # begun at 0, asked at 7 and 14, over at 21
