"""What the migration pages say of pagedcore is true, row by row."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import pagedcore
from pagedcore import LLM, AsyncEngine, EngineConfig, SamplingParams
from pagedcore.cli import app
from pagedcore.metrics_compat.vllm_names import VLLM_FAMILIES
from pagedcore.observe.catalogue import FAMILIES
from pagedcore.outputs import CompletionOutput, RequestOutput
from support.markdown import SPAN, tables
from support.repository import ROOT

ENGLISH = sorted((ROOT / "docs" / "migration").glob("*.md"))
VLLM = tables(ROOT / "docs" / "migration" / "vllm.md")
SAME = "the same names"
SETTINGS = {field.name for field in dataclasses.fields(EngineConfig)}
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
OWNERS = {
    "llm": LLM,
    "engine": AsyncEngine,
    "output": {f.name for f in dataclasses.fields(RequestOutput)} | set(dir(RequestOutput)),
    "outputs": {f.name for f in dataclasses.fields(CompletionOutput)},
}
SETTING = re.compile(r"^(\w+)=(.+)$")
METHOD = re.compile(r"^(llm|engine)\.(\w+)\(")


def cells(rows: list[list[str]], column: int) -> list[str]:
    return [span for row in rows for span in SPAN.findall(row[column])]


@pytest.mark.parametrize("row", VLLM["The same script"], ids=lambda row: row[0])
def test_each_import_and_command_works_with_the_name_replaced(row: list[str]) -> None:
    theirs, ours = (SPAN.findall(cell)[0] for cell in row)
    assert theirs.replace("vllm", "pagedcore") == ours
    if ours.startswith("from "):
        exec(ours, {})
    elif ours.startswith("pagedcore "):
        assert ours.split()[1] in {command.callback.__name__ for command in app.registered_commands if command.callback}
    else:
        assert (ROOT / "pagedcore" / "compat" / "entrypoints" / "openai" / "api_server.py").is_file()


def test_settings_of_the_tables_exist() -> None:
    rows = VLLM["Settings"]
    assert {name for row in rows if row[1] == SAME for name in SPAN.findall(row[0])} <= SETTINGS
    named = {span for row in rows if row[1] != SAME for span in SPAN.findall(row[1])}
    assert len(named) > 12
    assert named <= SETTINGS


def test_methods_and_fields_of_the_requests_table_exist() -> None:
    rows = VLLM["Requests"]
    calls = [METHOD.match(span) for span in cells(rows, 1)]
    named = {(match[1], match[2]) for match in calls if match}
    assert len(named) >= 5
    assert all(hasattr(OWNERS[owner], method) for owner, method in named)
    same = [span for row in rows if row[1] == SAME for span in SPAN.findall(row[0])]
    fields = {span.rpartition(".")[2] for span in same if "(" not in span}
    assert fields <= OWNERS["output"] | OWNERS["outputs"]
    assert {"timings", "cache", "num_cached_tokens"} <= OWNERS["output"]


def test_sampling_parameters_that_mean_the_same_exist() -> None:
    text = (ROOT / "docs" / "migration" / "vllm.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"^`temperature`.*?mean the same\.$", text, re.DOTALL | re.MULTILINE)
    assert set(SPAN.findall(sentence)) <= SAMPLING
    assert SAMPLING - set(SPAN.findall(sentence)) == {
        "presence_penalty", "frequency_penalty", "repetition_penalty", "structured_outputs",
    }  # fmt: skip


def test_metrics_of_the_table_exist() -> None:
    named = set(cells(VLLM["Metrics"], 1))
    assert len(named) >= 14
    assert named <= set(FAMILIES)
    assert {name for name in cells(VLLM["Metrics"], 0) if name.startswith("vllm:")} <= set(VLLM_FAMILIES)


def refusals() -> list[tuple[str, str, str]]:
    """Page, what is given, and the error that the row names for it."""
    found = []
    for page in ENGLISH:
        for theirs, ours, _ in tables(page)["What is refused"]:
            errors = SPAN.findall(ours)
            for index, span in enumerate(SPAN.findall(theirs)):
                if SETTING.match(span) and errors and errors[0] != "ValidationError" and "pipeline" not in span:
                    found.append((page.stem, span, errors[min(index, len(errors) - 1)]))
    return found


@pytest.mark.parametrize(("page", "given", "error"), refusals())
def test_what_is_said_to_be_refused_is(page: str, given: str, error: str) -> None:
    match = SETTING.match(given)
    assert match is not None
    options = {match[1]: ast.literal_eval(match[2])}
    expected = getattr(pagedcore, error, None) or {"TypeError": TypeError}[error]
    with pytest.raises(expected) as caught:
        SamplingParams(**options) if expected is TypeError else EngineConfig.from_mapping(options)
    assert type(caught.value) is expected


def test_refusals_were_found_on_the_pages() -> None:
    assert len(refusals()) > 15


def test_methods_that_are_said_to_be_missing_are() -> None:
    (row,) = [row for row in VLLM["What is refused"] if row[1] == "`AttributeError`"]
    names = [METHOD.match(span) for span in SPAN.findall(row[0])]
    assert len(names) == 4
    assert not [match[2] for match in names if match is None or hasattr(LLM, match[2])]


def test_options_that_a_langchain_model_refuses_are_named() -> None:
    langchain_llm = pytest.importorskip("pagedcore_adapters.langchain_llm")
    for name in ("num_beams", "logprobs"):
        with pytest.raises(ValueError, match=name):
            langchain_llm.PagedCoreLLM(model_kwargs={name: 4})


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_both_languages_have_the_same_rows(page: Path) -> None:
    chinese = ROOT / "docs" / "zh-CN" / "migration" / page.name
    for theirs, ours in zip(tables(chinese).values(), tables(page).values(), strict=True):
        assert [sorted(SPAN.findall(row[0])) for row in theirs] == [sorted(SPAN.findall(row[0])) for row in ours]
