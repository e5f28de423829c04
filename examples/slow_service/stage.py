"""What the five stories share: an engine with its live page, and a table of what was seen before and after the cure."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedcore import LLM

Facts = Mapping[str, float | int | str]
"""What a scene showed, by name; the name says the unit."""

PORT = 8000


@dataclass(frozen=True, slots=True)
class Scene:
    """Settings of an engine, and what its clients do. Only `play` or `settings` differ between the scenes of a story."""

    name: str
    settings: Mapping[str, Any]
    play: Callable[[Stage], Facts]


@dataclass(frozen=True, slots=True)
class Story:
    """A slow service, and the same one cured."""

    title: str
    before: Scene
    after: Scene


class Stage:
    """Owns the engine of a scene, and the server of its live page once somebody asks for `url`."""

    def __init__(self, scene: Scene, *, port: int = 0) -> None:
        """Port 0 is any that is free."""
        self.scene = scene
        self.llm = LLM(**scene.settings)
        self._port = port
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._console = Console(soft_wrap=True)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        self.llm.close()

    @cached_property
    def url(self) -> str:
        """The address of a server over this engine; the first question starts it."""
        import uvicorn

        from pagedcore.openai import ServerSettings, build_app

        app = build_app(self.llm.engine, ServerSettings(ui_show_text=True))
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self._port, log_level="error", ws="none"))
        self._thread = threading.Thread(target=self._server.run, name="live-page", daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            if not self._thread.is_alive():
                raise SystemExit(f"Port {self._port} cannot be served; end what listens there.")
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def first_token_ms(self) -> float:
        """The median of the last minute."""
        (stats,) = self.llm.engine.inspect_sync("stats")
        return 1000.0 * float(stats["last_minute"]["ttft_p50_s"])

    def say(self, text: str) -> None:
        """Print what the engine says in words."""
        self._console.print(f"  {text}", highlight=False, markup=False)

    def pause(self, what: str) -> None:
        """Wait until somebody has looked."""
        self._console.input(f"  {what} {self.url}/ui, then press Enter. ", markup=False)


def tell(story: Story, *, ui: bool = False) -> tuple[Facts, Facts]:
    """Play both scenes and print what was seen. With `ui` it waits before and after each, for the live page."""
    console = Console(soft_wrap=True)
    console.rule(story.title)
    before, after = (_play(scene, console, ui=ui) for scene in (story.before, story.after))
    table = Table("", story.before.name, story.after.name)
    for name in before:
        table.add_row(name, _shown(before[name]), _shown(after[name]))
    console.print(table)
    return before, after


def main(story: Story) -> None:
    """The command line of every story."""
    parser = argparse.ArgumentParser(description=story.title)
    parser.add_argument("--ui", action="store_true", help=f"stop before and after each scene to look at http://127.0.0.1:{PORT}/ui")
    tell(story, ui=parser.parse_args().ui)


def _play(scene: Scene, console: Console, *, ui: bool) -> Facts:
    console.print(f"[bold]{scene.name}[/bold]", highlight=False)
    with Stage(scene, port=PORT if ui else 0) as stage:
        if ui:
            stage.pause("Open")
        facts = scene.play(stage)
        if ui:
            stage.pause("Look at")
    return facts


def _shown(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
