"""An engine that says what a script says to each prompt, through the real front, byte by byte, and with the real grammars checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pagedcore import AsyncEngine
from pagedcore.messages import AddRequest, InboxMessage, RequestUpdate
from support.fake_engine import FakeLoop, Outbox, _report, _Running
from support.grammars import BACKEND, EOS, VOCAB_SIZE, accepts, make_grammars
from support.small_tokenizers import load_saved

TOOL_TEMPLATE = (
    "{% if tools %}{{ 'tools: ' + tools | tojson + ', called as <tool_call>...</tool_call>\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}]{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Shows all that a template can see of tools and calls."""
THINKING_TEMPLATE = TOOL_TEMPLATE + "{# <think></think> #}"

Script = Callable[[str], str]
"""Prompt -> the whole answer."""


@dataclass
class ScriptedLoop(FakeLoop):
    """Gives each prompt the answer of `script`, `tokens_per_step` at a time."""

    script: Script = lambda _: "Hi"
    tokens_per_step: int = 1
    broken_grammars: list[str] = field(default_factory=list)
    """Answers that their grammar would not have let through."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.info = dataclasses.replace(self.info, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
        self.grammars = make_grammars()  # type: ignore[assignment]
        self._answers: dict[str, list[int]] = {}

    def submit(self, message: InboxMessage, outbox: Outbox | None = None) -> None:
        if isinstance(message, AddRequest):
            answer = self.script(self.text.decode(message.prompt_token_ids)) if self._is_gathering else "warm"
            form = message.params.structured_outputs
            if form is not None and not accepts(self.grammars, form, answer):
                self.broken_grammars.append(answer)
            self._answers[message.request_id] = self._tokens_of(answer)
        super().submit(message, outbox)

    def is_saying(self, answer: str) -> bool:
        """Whether a request with this answer runs."""
        token_ids = self._tokens_of(answer)
        return any(self._answers[request_id] == token_ids for request_id in list(self._running))

    def _tokens_of(self, answer: str) -> list[int]:
        return [*self.text.encode(answer, add_special_tokens=False), EOS]

    def _step(self) -> None:
        self.batch_sizes.append(len(self._running))
        for running in list(self._running.values()):
            running.outbox([self._advanced(running)])

    def _advanced(self, running: _Running) -> RequestUpdate:
        request = running.request
        limit = request.params.max_tokens
        answer = self._answers[request.request_id]
        end = min(running.num_tokens + self.tokens_per_step, len(answer), len(answer) if limit is None else limit)
        update = RequestUpdate(request_id=request.request_id, new_token_ids=answer[running.num_tokens : end], cache=_report(request))
        running.num_tokens = end
        if end in (len(answer), limit):
            update.finish_reason, update.status = "stop" if end == len(answer) else "length", "completed"
            del self._running[request.request_id]
        return update


@contextmanager
def scripted_engine(folder: Path, script: Script | str, *, template: str = TOOL_TEMPLATE) -> Iterator[tuple[AsyncEngine, ScriptedLoop]]:
    """An `AsyncEngine` over a `ScriptedLoop`; one text is the answer to everything."""
    says = script if callable(script) else (lambda _: script)
    loop = ScriptedLoop(load_saved(folder, BACKEND, chat_template=template), script=says)
    engine = AsyncEngine(loop=loop, text=loop.text)  # type: ignore[arg-type]
    try:
        yield engine, loop
    finally:
        engine.close_sync()
    assert not loop.broken_grammars, "the script says what the grammar forbids"
