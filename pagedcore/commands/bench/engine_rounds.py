"""Rounds of requests on an engine in this process: warm-up, an empty prefix cache, the clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore.commands.bench.workloads import BenchRequest
from pagedcore.commands.throughput import Result, result_of
from pagedcore.errors import EngineError
from pagedcore.front import TokenizedPrompt
from pagedcore.outputs import RequestOutput
from pagedcore.request_stream import QueueWaker, RequestStream
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine

WARM_UP_TOKENS = 8
"""What is paid once (kernels that are compiled, memory that is touched) is paid by so many tokens of each request."""
MAX_EMPTYING_S = 10.0

Clock = Callable[[], float]


class RequestLoop:
    """Owns the open streams of a round and keeps `concurrency` of them: one is opened as another ends. One thread reads them all."""

    def __init__(self, engine: AsyncEngine, requests: Sequence[BenchRequest], temperature: float) -> None:
        self.outputs: list[RequestOutput] = []
        """Of the requests that have ended."""
        self._engine = engine
        self._waiting = deque(requests)
        self._temperature = temperature
        self._waker = QueueWaker()
        self._open: dict[str, RequestStream] = {}

    def run(self, concurrency: int, advance: Callable[[], None]) -> None:
        """Until every request has ended. Raises the first failure."""
        with self._engine.loop.gathering():
            for _ in range(min(concurrency, len(self._waiting))):
                self._open_next()
        while self._open:
            for stream in self._waker.wait():
                stream.absorb()
                if stream.finished and stream.request_id in self._open:
                    self._end(stream)
                    advance()

    def close(self) -> None:
        """What still runs is aborted."""
        for stream in self._open.values():
            self._engine.front.close_stream(stream)

    def _open_next(self) -> None:
        request = self._waiting.popleft()
        params = SamplingParams(temperature=self._temperature, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False)
        prompt = TokenizedPrompt(text=None, token_ids=request.prompt)
        stream = self._engine.front.open(prompt, params, None, context=None, arrival_s=time.monotonic(), waker=self._waker)
        self._open[stream.request_id] = stream

    def _end(self, stream: RequestStream) -> None:
        output = stream.output()
        if output.error is not None:
            raise output.error
        del self._open[stream.request_id]
        self._engine.front.close_stream(stream)
        self.outputs.append(output)
        if self._waiting:
            self._open_next()


@dataclass(frozen=True, slots=True)
class EngineRounds:
    """One engine, and how it is asked."""

    engine: AsyncEngine
    temperature: float = 0.0
    clock: Clock = time.perf_counter

    def warm_up(self, requests: Sequence[BenchRequest], concurrency: int) -> None:
        """The same prompts with a few tokens each, not timed."""
        short = [BenchRequest(prompt=r.prompt, num_output_tokens=min(r.num_output_tokens, WARM_UP_TOKENS)) for r in requests]
        self.run(short, concurrency, lambda: None)

    def run(self, requests: Sequence[BenchRequest], concurrency: int, advance: Callable[[], None]) -> Result:
        """One round from an empty prefix cache. Timed: from before the first request is sent until the last has its last token.

        Raises before anything runs for a request that can never fit, else the first failure.
        """
        for request in requests:
            self.engine.loop.check_request(len(request.prompt), request.num_output_tokens)
        empty_prefix_cache(self.engine)
        loop = RequestLoop(self.engine, requests, self.temperature)
        start_s = self.clock()
        try:
            loop.run(concurrency, advance)
            wall_s = self.clock() - start_s
        finally:
            loop.close()
        return result_of(loop.outputs, wall_s)


def empty_prefix_cache(engine: AsyncEngine) -> None:
    """A step in flight may still hold blocks of a request that has ended; each call lets the engine go on.

    Raises `EngineError` when blocks are held for longer than `MAX_EMPTYING_S`.
    """
    deadline_s = time.monotonic() + MAX_EMPTYING_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline_s:
            raise EngineError(
                f"The prefix cache could not be emptied within {MAX_EMPTYING_S:g} s: {engine.stats().num_active_blocks} KV blocks are held."
            )
