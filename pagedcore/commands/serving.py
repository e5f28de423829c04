"""What `pagedcore serve --socket/--fronts` prints and runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.engine_process import Signals, ending_signals, served_engine
from pagedcore.commands.greeting import greeting
from pagedcore.commands.http_front import FrontPlan, serve_front
from pagedcore.commands.http_fronts import run_fronts
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.models.embedded import EMBEDDED_NAME
from pagedcore.openai.settings import ServerSettings
from pagedcore.remote.channel import take_turns_quickly
from pagedcore.warm_up import WarmUpPrompt, as_token_ids, read_warm_up_file

Say = Callable[[str], None]


def serve_by_fronts(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    engine_socket: Path | None,
    num_fronts: int,
    warmup_file: Path | None,
    drain_timeout_s: float,
    say: Say,
) -> None:
    """HTTP fronts over the engine at `engine_socket`, or over one in this process. Raises what either raises."""
    plan_at = partial(FrontPlan, host=host, port=port, settings=settings, drain_timeout_s=drain_timeout_s)
    if engine_socket is not None:
        check_attaches(config, warmup_file)
        attach_fronts(plan_at(engine_socket=str(engine_socket)), num_fronts, say)
        return
    prompts = [] if warmup_file is None else read_warm_up_file(warmup_file)
    with tempfile.TemporaryDirectory(prefix="pagedcore-") as folder:
        plan = plan_at(engine_socket=str(Path(folder) / "engine.sock"))
        _serve_own_engine(config, prompts, plan, num_fronts, say)


def _serve_own_engine(config: EngineConfig, prompts: list[WarmUpPrompt], plan: FrontPlan, num_fronts: int, say: Say) -> None:
    take_turns_quickly()
    say(f"pagedcore loads {config.model or EMBEDDED_NAME} ...")
    with served_engine(config, plan.engine_socket) as (engine, _), ending_signals() as signals:
        engine.warm_up([as_token_ids(prompt, engine.text) for prompt in prompts])
        _run(plan, num_fronts, signals, say, lambda: engine.info.model_names[0], lambda: engine.loop.is_alive)


def check_attaches(config: EngineConfig, warmup_file: Path | None) -> None:
    """Raises `ConfigError` for settings of an engine that is there already."""
    changed = [name for name in EngineConfig.__dataclass_fields__ if getattr(config, name) != getattr(EngineConfig(), name)]
    if changed or warmup_file is not None:
        flag = f"--{changed[0].replace('_', '-')}" if changed else "--warmup-file"
        raise ConfigError(f"{flag} is a setting of the engine, which --socket only attaches to; give it to `pagedcore engine`.")


def attach_fronts(plan: FrontPlan, num_fronts: int, say: Say) -> None:
    """One front in this process, or several of their own."""
    say(f"pagedcore attaches to the engine at {plan.engine_socket}; where none is yet, it waits for `pagedcore engine --socket ...`.")
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
    return greeting(plan.host, plan.port, model_name, needs_key=bool(plan.settings.api_keys or plan.settings.tenants))
