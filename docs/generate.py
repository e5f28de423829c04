"""Writes the reference pages from the code: `make docs-update`. A test fails when a page differs from what this writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pagedcore.commands.field_docs import field_docs
from pagedcore.config import EngineConfig
from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES
from pagedcore.sampling_params import SamplingParams

HERE = Path(__file__).parent
NOTICE = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"


def settings_page() -> str:
    """Every field of the config and of the sampling parameters, with default and docstring."""
    return (
        f"{NOTICE}# Settings\n\nKeywords of `LLM`, `AsyncEngine` and `EngineConfig`; flags of `pagedcore serve` with `-` for `_`.\n\n"
        + _field_table(EngineConfig)
        + "\n# Sampling parameters\n\nFields of `SamplingParams`, and of the body of a completion request.\n\n"
        + _field_table(SamplingParams)
    )


def metrics_page() -> str:
    """Every metric family."""
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels) or '-'} | {_cell(family.help)} |"
        for family in FAMILIES.values()
    ]
    base = " and ".join(f"`{label}`" for label in BASE_LABELS)
    head = "| name | type | more labels | what it says |\n|---|---|---|---|\n"
    return f"{NOTICE}# Metrics\n\nThe same through every adapter. All have the labels {base}.\n\n{head}" + "\n".join(rows) + "\n"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def _field_table(cls: type) -> str:
    docs = field_docs(cls)
    rows = [f"| `{field.name}` | {_default(field)} | {_cell(docs[field.name])} |" for field in dataclasses.fields(cls)]
    return "| name | default | what it does |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _default(field: dataclasses.Field[object]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return "-" if value in (None, (), {}) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
