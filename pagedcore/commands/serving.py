"""What `pagedcore engine` and `pagedcore serve --socket/--fronts` print and run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.engine_process import Signals, ending_signals, run_engine, served_engine
from pagedcore.commands.greeting import greeting
from pagedcore.commands.http_front import FrontPlan, serve_front
from pagedcore.commands.http_fronts import run_fronts
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.models.embedded import EMBEDDED_NAME
from pagedcore.remote.channel import take_turns_quickly
from pagedcore.warm_up import as_token_ids, read_warm_up_file

Say = Callable[[str], None]


def serve_engine(config: EngineConfig, path: Path, grace_s: float, warmup_file: Path | None) -> None:
    """An engine at a socket until a signal comes. Raises what starting an engine raises."""
    from rich.console import Console

    take_turns_quickly()
    prompts = [] if warmup_file is None else read_warm_up_file(warmup_file)
    with served_engine(config, path) as (engine, server), ending_signals() as signals:
        engine.warm_up([as_token_ids(prompt, engine.text) for prompt in prompts])
        Console().print(engine_greeting(engine, path))
        run_engine(engine, server, signals, grace_s)


def engine_greeting(engine: AsyncEngine, path: Path) -> Any:
    """A panel: what is served, and how to attach to it."""
    from rich.markup import escape
    from rich.panel import Panel

    plan = engine.plan
    where = escape(str(path.absolute()))
    facts = (
        f"{plan.device}, {plan.dtype}, {plan.num_blocks} KV blocks of {plan.block_size} tokens, {plan.config.max_num_seqs} requests at once"
    )
    return Panel(
        f"[bold]{escape(plan.model_name)}[/bold]: {facts}\n\n"
        f'In Python     engine = AsyncEngine.connect("{where}")\n'
        f"Over HTTP     pagedcore serve --socket {where} --fronts 4\n"
        "Stop          Ctrl-C or SIGTERM; requests that run are finished first",
        title=f"pagedcore engine at {where}",
        expand=False,
    )


def serve_by_fronts(
    config: EngineConfig, engine_socket: Path | None, num_fronts: int, plan: FrontPlan, warmup_file: Path | None, say: Say
) -> None:
    """HTTP fronts over the engine at `engine_socket`, or over one in this process. Raises what either raises."""
    if engine_socket is not None:
        check_attaches(config, warmup_file)
        attach_fronts(replace(plan, engine_socket=str(engine_socket)), num_fronts, say)
        return
    take_turns_quickly()
    prompts = [] if warmup_file is None else read_warm_up_file(warmup_file)
    say(f"pagedcore loads {config.model or EMBEDDED_NAME} ...")
    with (
        tempfile.TemporaryDirectory(prefix="pagedcore-") as folder,
        served_engine(config, Path(folder) / "engine.sock") as (engine, _),
        ending_signals() as signals,
    ):
        engine.warm_up([as_token_ids(prompt, engine.text) for prompt in prompts])
        plan = replace(plan, engine_socket=str(Path(folder) / "engine.sock"))
        _run(plan, num_fronts, signals, say, lambda: engine.info.model_names[0], lambda: engine.loop.is_alive)


def check_attaches(config: EngineConfig, warmup_file: Path | None) -> None:
    """Raises `ConfigError` for settings of an engine that is there already."""
    changed = [name for name in EngineConfig.__dataclass_fields__ if getattr(config, name) != getattr(EngineConfig(), name)]
    if changed or warmup_file is not None:
        flag = f"--{changed[0].replace('_', '-')}" if changed else "--warmup-file"
        raise ConfigError(f"{flag} is a setting of the engine, which --socket only attaches to; give it to `pagedcore engine`.")


def attach_fronts(plan: FrontPlan, num_fronts: int, say: Say) -> None:
    """One front in this process, or several of their own."""
    if num_fronts == 1:
        serve_front(plan, lambda engine: say(_greeting(plan, engine.info.model_names[0])))
        return
    with ending_signals() as signals:
        _run(plan, num_fronts, signals, say, lambda: _name_at(plan.engine_socket), lambda: True)


def _run(plan: FrontPlan, num_fronts: int, signals: Signals, say: Say, name: Callable[[], str], is_well: Callable[[], bool]) -> None:
    run_fronts(replace(plan, shares_port=True), num_fronts, signals, lambda: say(_greeting(plan, name())), is_well)


def _name_at(engine_socket: str) -> str:
    engine = AsyncEngine.connect(engine_socket)
    try:
        return engine.info.model_names[0]
    finally:
        engine.close_sync()


def _greeting(plan: FrontPlan, model_name: str) -> str:
    return greeting(plan.host, plan.port, model_name, needs_key=bool(plan.api_keys or plan.tenants))
