"""Grammars of one vocabulary, compiled by llguidance and kept while they are in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pagedcore.errors import InvalidRequestError
from pagedcore.grammar.compiling import Vocabulary, compile_grammar
from pagedcore.grammar.matcher import MaskWorker, Matcher
from pagedcore.grammar.reasoning import Reasoning, ReasoningEnd, reasoning_of
from pagedcore.grammar.trial import TRIED_CHARS, check_in_a_trial
from pagedcore.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64
"""Compiled grammars that are kept for later requests."""

MAX_KEPT_ENDS = 8
"""Ends of reasoning that are kept, too: one a model, and those that callers name."""


class Grammars:
    """Owns the vocabulary as llguidance takes it and the grammars compiled for it. Thread-safe.

    `tokenizer_json` gives the text of the model's tokenizer.json; it is asked at the first grammar.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._ends: OrderedDict[str, ReasoningEnd] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._worker: MaskWorker | None = None

    def is_ready(self, params: StructuredOutputsParams) -> bool:
        """Whether this grammar is compiled, so that `prepare` returns at once."""
        with self._lock:
            return params in self._compiled and params.reasoning_end in (None, *self._ends)

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Take one new token of each output; the next masks are being computed."""
        assert self._worker is not None, "an open matcher has a worker"
        self._worker.advance(matchers, token_ids)

    def prepare(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar unless it is kept. May take a second: call it where nobody waits for the thread.

        Raises `InvalidRequestError` with the reason of the library, and `MissingExtraError` where there is no library.
        """
        if params.reasoning_end is not None:
            self._end(params.reasoning_end)
        self._grammar(params)

    def open(self, params: StructuredOutputsParams, token_ids: Sequence[int]) -> Matcher:
        """The matcher of an output that begins with `token_ids`, of a grammar that is prepared; its first mask is being computed."""
        num_tokens = self._loaded().vocab_size
        with self._lock:
            self._worker = self._worker or MaskWorker(num_tokens)
        return self._worker.open(lambda: (self._grammar(params).deep_copy(), self._reasoning(params)), token_ids)

    def _reasoning(self, params: StructuredOutputsParams) -> Reasoning | None:
        if params.reasoning_end is None:
            return None
        return reasoning_of(params, self._end(params.reasoning_end), self._loaded())

    def _end(self, text: str) -> ReasoningEnd:
        with self._lock:
            if text in self._ends:
                self._ends.move_to_end(text)
                return self._ends[text]
        end = ReasoningEnd(text, self._loaded())
        with self._lock:
            self._ends[text] = end
            while len(self._ends) > MAX_KEPT_ENDS:
                self._ends.popitem(last=False)
        return end

    def _grammar(self, params: StructuredOutputsParams) -> LLMatcher:
        with self._lock:
            if params in self._compiled:
                self._compiled.move_to_end(params)
                return self._compiled[params]
        grammar = self._compile(params)
        with self._lock:
            self._compiled[params] = grammar
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        tokens = self._loaded()
        if len(params.text) > TRIED_CHARS:
            check_in_a_trial(params, self._vocabulary)
        return compile_grammar(params, tokens)

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokens is None:
                self._tokens = self._vocabulary.load()
            return self._tokens

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer_json(), self._vocab_size, self._eos_token_ids)


def prepare(grammars: Grammars | None, params: StructuredOutputsParams) -> None:
    """`Grammars.prepare`. Raises `InvalidRequestError` where there is no tokenizer to follow grammars with."""
    if grammars is None:
        message = "structured_outputs needs a tokenizer; the engine has none (skip_tokenizer_init=True)."
        raise InvalidRequestError(message, param="structured_outputs")
    grammars.prepare(params)
