"""A large grammar compiled in a process of its own first: one that would take minutes, or overflow a stack, does so there."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress

from pagedcore.errors import RequestError
from pagedcore.grammar.compiling import Vocabulary, compile_grammar, refusal
from pagedcore.structured_outputs import StructuredOutputsParams

TRIED_CHARS = 8192
"""Grammars of more characters are tried first. Shorter ones were found to compile in milliseconds, whatever they hold."""

MAX_TRIAL_S = 5.0
"""Longest that a trial may take, start of the process included."""


def check_in_a_trial(params: StructuredOutputsParams, vocabulary: Vocabulary) -> None:
    """Raise `InvalidRequestError` for a grammar that takes too long, or that ends the process which compiles it."""
    message = json.dumps([[params.kind, params.text, params.disable_any_whitespace], dataclasses.astuple(vocabulary)])
    command = [sys.executable, "-m", __name__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, input=message.encode(), capture_output=True, timeout=MAX_TRIAL_S, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise refusal(params, f"it takes more than {MAX_TRIAL_S:g} s to compile; make it smaller") from None
    if done.returncode < 0:
        raise refusal(params, "it is too deeply nested; make it smaller")


def _try() -> None:
    """What the process does. In a thread, since those have the stack that the compiling thread of a server has."""
    (kind, text, is_compact), vocabulary = json.load(sys.stdin)
    value = json.loads(text) if kind == "choice" else text
    params = StructuredOutputsParams.of({kind: value, "disable_any_whitespace": is_compact})
    assert params is not None, "a grammar was given"
    thread = threading.Thread(target=_compile, args=(params, Vocabulary(*vocabulary)))
    thread.start()
    thread.join()


def _compile(params: StructuredOutputsParams, vocabulary: Vocabulary) -> None:
    with suppress(RequestError):  # whoever asked finds the same, as fast
        compile_grammar(params, vocabulary.load())


if __name__ == "__main__":
    _try()
