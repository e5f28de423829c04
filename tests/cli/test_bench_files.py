"""`pagedcore bench`: what is written, read back, shown and refused."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from pagedcore.commands.bench.facts import commit_of, model_name, model_shape, software_facts
from pagedcore.commands.bench.outputs import Outputs
from pagedcore.commands.bench.results import Results, read_results, write_csv, write_json
from pagedcore.commands.bench.spread import Spread
from pagedcore.commands.bench.table import show, significant
from pagedcore.errors import ConfigError
from support.bench_runs import ALL, FACTS, results, spread, throughput_point


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.command)
def test_json_is_read_back_as_it_was(run: Results, tmp_path: Path) -> None:
    write_json(run, tmp_path / "run.json")
    assert read_results(tmp_path / "run.json") == run


def test_json_tells_value_spread_and_rounds(tmp_path: Path) -> None:
    write_json(results("throughput", [{"x": spread(3.0, 1.0, 2.0), "n": 4}]), tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert data["points"] == [{"x": {"value": 2.0, "low": 1.0, "high": 3.0, "rounds": [3.0, 1.0, 2.0]}, "n": 4}]
    assert data["facts"] == FACTS


def test_what_is_no_number_is_null_in_json_and_comes_back(tmp_path: Path) -> None:
    write_json(results("prefix", [{"hit_rate": spread(math.nan)}]), tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["points"][0]["hit_rate"]["value"] is None
    (point,) = read_results(tmp_path / "run.json").points
    rate = point["hit_rate"]
    assert isinstance(rate, Spread)
    assert math.isnan(rate.value)


def test_csv_has_a_line_a_point_with_the_facts_on_each(tmp_path: Path) -> None:
    run = results("throughput", [throughput_point(1, 4.0, 2.0), throughput_point(8, 30.0)])
    write_csv(run, tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert first["command"] == "throughput"
    assert first["device"] == second["device"] == "NVIDIA H200"
    assert (first["concurrency"], second["concurrency"]) == ("1", "8")
    assert [first[f"output_tokens_per_s{end}"] for end in ("", "_low", "_high")] == ["3.0", "2.0", "4.0"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"command": "nonsense", "label": "", "facts": {}, "work": {}, "points": []}', '"x"', "7"]
)
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other\.json' holds no results of pagedcore bench"):
        read_results(tmp_path / "other.json")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json' cannot be read: No such file"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.command)
def test_a_table_fits_eighty_columns_and_breaks_no_number(run: Results) -> None:
    out = io.StringIO()
    show(Console(file=out, width=80), run)
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.splitlines()[0].strip() == f"pagedcore bench {run.command}: Qwen3-0.6B, bfloat16"
    assert "NVIDIA H200" in shown
    assert "Timed: " in shown or "Timed in the clients: " in shown
    rule = next(index for index, line in enumerate(shown.splitlines()) if "──" in line)
    assert len(shown.splitlines()[rule + 1 :]) >= len(run.points)
    assert not any(line.strip() == "" for line in shown.splitlines()[rule + 1 : rule + 1 + len(run.points)])


def test_a_table_shows_the_median_and_the_range_of_the_rounds() -> None:
    out = io.StringIO()
    show(Console(file=out, width=80), ALL[0])
    assert "22,535  22,000–23,070" in out.getvalue()


@pytest.mark.parametrize(("value", "shown"), [(0.766, "0.77"), (12.34, "12.3"), (123.4, "123"), (23_439.5, "23,440"), (math.nan, "-")])
def test_numbers_have_three_digits_or_those_before_the_point(value: float, shown: str) -> None:
    assert significant(value) == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": Path("/no/such/folder/a.json")}, "The folder '/no/such/folder' of '/no/such/folder/a.json' does not exist"),
        ({"csv": Path("/no/such/folder/a.csv")}, "does not exist"),
        ({"json": Path("/tmp")}, "'/tmp' cannot be written: it is a folder"),
        ({"plot": Path("plot.txt")}, r"'plot\.txt' must end with one of \.png, \.svg, \.pdf"),
        ({"beside": (Path("a.json"),)}, "give --plot too"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Outputs(**options).check("throughput")  # type: ignore[arg-type]


def test_files_are_written_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Outputs(json=tmp_path / "a.json", csv=tmp_path / "a.csv").publish(ALL[0])
    assert read_results(tmp_path / "a.json") == ALL[0]
    assert (tmp_path / "a.csv").read_text(encoding="utf-8").startswith("command,label,device,")
    assert "pagedcore bench throughput" in capsys.readouterr().out


def test_facts_name_versions_and_the_date_in_utc() -> None:
    import pagedcore

    facts = software_facts()
    assert facts["pagedcore"] == pagedcore.__version__
    assert str(facts["date"]).endswith("+00:00")


def test_the_shape_is_read_off_config_json(tmp_path: Path) -> None:
    assert model_shape(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "vocab_size": 100, "model_type": "llama"}', encoding="utf-8")
    assert model_shape(tmp_path) == {"hidden_size": 64, "vocab_size": 100}


def test_a_local_model_is_called_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "qwen3").mkdir()
    assert model_name(str(tmp_path / "qwen3")) == "qwen3"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_commit_is_named_only_for_a_package_that_is_in_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    assert commit_of(package) is None
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "x")
    assert commit_of(package) is None, "the checkout of somebody else's project that has us installed in it"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    commit = commit_of(package)
    assert commit is not None
    assert len(commit) >= 7
    (package / "__init__.py").write_text("changed", encoding="utf-8")
    assert commit_of(package) == commit + "+"


def test_a_commit_is_written_where_git_tells_none(tmp_path: Path) -> None:
    unknown = dataclasses.replace(ALL[0], facts={**FACTS, "commit": None})
    for run, commit in ((unknown, "def5678"), (ALL[0], FACTS["commit"])):
        Outputs(json=tmp_path / "run.json", commit="def5678").publish(run)
        assert read_results(tmp_path / "run.json").facts["commit"] == commit
