"""`pagedcore chat`: a conversation in the terminal, streamed. Each turn finds the earlier ones in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pagedcore.commands.one_shot import cache_line
from pagedcore.errors import RequestError
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine

HELP = "Type a message. /reset starts over, /stats shows the cache, /help this, /quit (or Ctrl-D) ends; Ctrl-C stops an answer."

Write = Callable[[str], None]


class Conversation:
    """Owns the messages so far. `ask` streams one answer and keeps both turns; a turn that failed leaves no trace."""

    def __init__(self, engine: AsyncEngine, params: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = [*self._system]
        self.last_output: RequestOutput | None = None

    def ask(self, message: str) -> Iterator[str]:
        """New pieces of the answer as they come. Raises `RequestError` when the conversation no longer fits the model."""
        text = self._engine.get_tokenizer()
        if text is None:
            raise RequestError("A chat needs a tokenizer; leave out --skip-tokenizer-init.")
        messages = [*self.messages, {"role": "user", "content": message}]
        answer = ""
        for output in self._engine.generate_sync(text.render_chat(messages), self._params, add_special_tokens=False):
            answer += output.text
            self.last_output = output
            yield output.text
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [*self._system]


def run_chat(conversation: Conversation, read_line: Callable[[], str], write: Write) -> None:
    """Read, answer, repeat, until /quit or the end of the input. `read_line` raises `EOFError` at the end."""
    write(HELP + "\n")
    while True:
        try:
            line = read_line().strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if line == "/quit":
            return
        if line:
            _turn(conversation, line, write)


def _turn(conversation: Conversation, line: str, write: Write) -> None:
    if line == "/help":
        write(HELP + "\n")
    elif line == "/reset":
        conversation.reset()
        write("(a new conversation)\n")
    elif line == "/stats":
        write(f"({cache_line(conversation.last_output)})\n" if conversation.last_output else "(nothing asked yet)\n")
    else:
        _answer(conversation, line, write)


def _answer(conversation: Conversation, line: str, write: Write) -> None:
    pieces = conversation.ask(line)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        write(" (stopped; not kept)")
    except RequestError as error:
        write(f"error: {error} /reset starts over.")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    write("\n")
