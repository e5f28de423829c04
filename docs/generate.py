"""Writes the reference pages from the code: `make docs-update`. A test fails when a page differs from what this writes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from typer.main import get_command

from pagedcore.cli import app
from pagedcore.commands.field_docs import field_docs
from pagedcore.config import EngineConfig
from pagedcore.metrics_compat.vllm_names import VLLM_FAMILIES
from pagedcore.models import cache_folder
from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES, Family
from pagedcore.openai.settings import ServerSettings
from pagedcore.sampling_params import SamplingParams
from pagedcore_adapters import _environment

HERE = Path(__file__).parent
NOTICE = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"


def settings_page() -> str:
    """Every field of the config, the server's settings and the sampling parameters, the flags that only the server has, and variables."""
    return (
        f"{NOTICE}# Settings\n\nKeywords of `LLM`, `AsyncEngine` and `EngineConfig`; flags of `pagedcore serve` with `-` for `_`.\n\n"
        + _field_table(EngineConfig)
        + "\n# Flags of pagedcore serve alone\n\nBeside those above.\n\n"
        + _flag_table("serve")
        + "\n# Server settings\n\nKeywords of `ServerSettings`, for `build_server`, `build_service`, `build_app` and `build_router`.\n\n"
        + _field_table(ServerSettings)
        + "\n# Sampling parameters\n\nFields of `SamplingParams`, and of the body of a completion request.\n\n"
        + _field_table(SamplingParams)
        + "\n# Environment variables\n\nBeside those of flags above, of any use of pagedcore:\n\n"
        + _variable_table(cache_folder)
        + "\nOf a BentoML service, each where `build_service` is given nothing in its place, as in `PagedCoreService`:\n\n"
        + _variable_table(_environment)
    )


def metrics_page() -> str:
    """Every metric family."""
    base = " and ".join(f"`{label}`" for label in BASE_LABELS)
    ours = f"# Metrics\n\nThe same through every adapter. All have the labels {base}.\n\n{_metrics_table(FAMILIES)}"
    theirs = (
        '# Under other names\n\nWith `metrics_compat="vllm"` (`--metrics-compat vllm`) the same numbers stand beside ours under the names, '
        f"types and buckets that vLLM's dashboards, autoscalers and gateways read.\n\n{_metrics_table(VLLM_FAMILIES)}"
    )
    return f"{NOTICE}{ours}\n{theirs}"


def _metrics_table(families: Mapping[str, Family]) -> str:
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels) or '-'} | {_cell(family.help)} |\n"
        for family in families.values()
    ]
    return "| name | type | more labels | what it says |\n|---|---|---|---|\n" + "".join(rows)


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def _field_table(cls: type) -> str:
    docs = field_docs(cls)
    rows = [f"| `{field.name}` | {_default(field)} | {_cell(docs[field.name])} |" for field in dataclasses.fields(cls)]
    return "| name | default | what it does |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _flag_table(command: str) -> str:
    """The options of a command that are no fields of the config."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    options = [option for option in get_command(app).commands[command].params if option.name not in fields]
    rows = [f"| {_spelled(option)} | {_shown(option.default)} | {_cell(option.help)} |" for option in options]
    return "| flag | default | what it does |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _variable_table(module: ModuleType) -> str:
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in _variables(module)]
    return "| variable | what it holds |\n|---|---|\n" + "\n".join(rows) + "\n"


def _variables(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Constants that name one, and the text below each."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in pairwise(body):
        match statement, following:
            case ast.Assign(value=ast.Constant(value=str(name))), ast.Expr(value=ast.Constant(value=str(text))):
                if name.startswith("PAGEDCORE_"):
                    yield name, text


def _spelled(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{option.metavar}`"
    variable = f" (or `{option.envvar}`)" if option.envvar else ""
    return f"`{option.opts[0]}`{variable}"


def _default(field: dataclasses.Field[object]) -> str:
    return _shown(field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default)


def _shown(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return f"`{type(value).__name__}()`"
    return "-" if value in (None, (), {}) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
