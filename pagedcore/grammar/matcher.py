"""Where outputs stand in their grammars, and the worker that keeps their masks ahead of the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from pagedcore.errors import PagedCoreError
from pagedcore.grammar.reasoning import Reasoning

if TYPE_CHECKING:
    from llguidance import LLMatcher

Begin = Callable[[], "tuple[LLMatcher, Reasoning | None]"]
"""A grammar at its beginning, and what may come before it. Raises `PagedCoreError`."""


class Matcher:
    """Owns the place of one output in its grammar. Only a worker moves it; who asks for the mask waits until it is computed."""

    def __init__(self, num_mask_bytes: int) -> None:
        self.grammar: LLMatcher | None = None
        self.reasoning: Reasoning | None = None
        """What the output may say before its grammar holds; None from where it holds on."""
        self.pending: Future[None] | None = None
        """What the worker was told of this matcher last."""
        self.error: str | None = None
        """Why no token can follow, where the grammar failed."""
        self._mask = memoryview(bytearray(num_mask_bytes))

    def mask(self) -> memoryview:
        """One bit a token, lowest first: whether it may come next. After an error no bit is set."""
        if self.pending is not None:
            self.pending.result()
        return self._mask

    def move(self, token_ids: Sequence[int]) -> None:
        """Take tokens, each the reasoning's or the grammar's."""
        assert self.grammar is not None, "an open matcher has a grammar"
        tokens, held = iter(token_ids), list[int]()
        while self.reasoning is not None:
            token_id = next(tokens, None)
            if token_id is None:
                return
            taken = self.reasoning.take(token_id)
            if taken is not None:
                self.reasoning, held = None, taken
        self.grammar.consume_tokens([*held, *tokens])

    def allow(self, mask: memoryview) -> None:
        """The worker's next mask, where the grammar does not hold yet."""
        self._mask = mask

    def take(self, mask: memoryview) -> None:
        """The worker's next mask; an empty one where the grammar failed."""
        assert self.grammar is not None, "a mask comes from a grammar"
        if self.grammar.is_error():
            self.error = " ".join(self.grammar.get_error().split())
            mask[:] = bytes(len(mask))
        self._mask = mask


class MaskWorker:
    """Owns one thread that moves matchers and computes masks, several at once where there are cores, without Python's lock."""

    def __init__(self, num_tokens: int) -> None:
        from llguidance import LLExecutor

        self._num_mask_bytes = -(-num_tokens // 32) * 4
        self._executor = LLExecutor()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedcore-grammar")

    def open(self, begin: Begin, token_ids: Sequence[int]) -> Matcher:
        """A new matcher after these tokens; its first mask is being computed."""
        matcher = Matcher(self._num_mask_bytes)
        matcher.pending = self._thread.submit(self._open, matcher, begin, token_ids)
        return matcher

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Take one new token of each output; the next masks are being computed."""
        pending = self._thread.submit(self._advance, matchers, token_ids)
        for matcher in matchers:
            matcher.pending = pending

    def _open(self, matcher: Matcher, begin: Begin, token_ids: Sequence[int]) -> None:
        try:
            matcher.grammar, matcher.reasoning = begin()
        except PagedCoreError as error:
            matcher.error = str(error)
            return
        matcher.move(token_ids)
        self._fill_masks([matcher])

    def _advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        moves: list[tuple[LLMatcher, int]] = []
        for matcher, token in zip(matchers, token_ids, strict=True):
            if matcher.reasoning is not None:
                matcher.move([token])
            elif matcher.grammar is not None:
                moves.append((matcher.grammar, token))
        if moves:
            self._executor.consume_token_par(moves)
        self._fill_masks([matcher for matcher in matchers if matcher.grammar is not None])

    def _fill_masks(self, matchers: Sequence[Matcher]) -> None:
        for matcher in matchers:
            if matcher.reasoning is not None and matcher.grammar is not None:
                matcher.allow(matcher.reasoning.mask(matcher.grammar))
        held = [matcher for matcher in matchers if matcher.reasoning is None]
        if held:
            self._fill_held(held)

    def _fill_held(self, matchers: Sequence[Matcher]) -> None:
        size = self._num_mask_bytes
        masks = bytearray(size * len(matchers))
        places = [(matcher.grammar, index) for index, matcher in enumerate(matchers) if matcher.grammar is not None]
        address = ctypes.addressof(ctypes.c_char.from_buffer(masks))
        self._executor.unsafe_compute_mask_ptr(places, address, size, len(matchers))
        for index, matcher in enumerate(matchers):
            matcher.take(memoryview(masks)[index * size : (index + 1) * size])
