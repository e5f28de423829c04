"""What API servers tell each other, so that a prompt finds its worker whichever of them it comes through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from pagedcore.routing.prefix_keys import PrefixKey
from pagedcore_adapters._litserve_messages import Traffic

PERIOD_S = 0.05
"""News of so long a time travel together, so that traffic costs the other API servers little."""

TellOthers = Callable[[Traffic], None]


class Gossip:
    """Owns the news of one API server that the others do not know yet. Used on its event loop only."""

    def __init__(self, queue_id: int, tell_others: TellOthers, own_loads: Callable[[], list[int]]) -> None:
        """`tell_others` may block: it is called from a thread. `own_loads` are asked for when the news leave."""
        self._queue_id = queue_id
        self._tell_others = tell_others
        self._own_loads = own_loads
        self._prompts: list[tuple[int, list[PrefixKey]]] = []
        self._sending: asyncio.Task[None] | None = None

    def note_prompt(self, worker_id: int, keys: Sequence[PrefixKey]) -> None:
        """A prompt went to a worker; the others hear of it a little later."""
        self._prompts.append((worker_id, list(keys)))
        self.note_loads()

    def note_loads(self) -> None:
        """The loads have changed."""
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send_later())

    async def _send_later(self) -> None:
        await asyncio.sleep(PERIOD_S)
        prompts, self._prompts, self._sending = self._prompts, [], None
        with suppress(EOFError, OSError):  # the server is shutting down
            await asyncio.to_thread(self._tell_others, Traffic(self._queue_id, prompts, self._own_loads()))
