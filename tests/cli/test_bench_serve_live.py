"""`pagedcore bench serve` with the server that it starts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedcore import cli
from pagedcore.commands.bench.results import read_results
from pagedcore.commands.bench.spread import Spread

pytestmark = [pytest.mark.model, pytest.mark.serve, pytest.mark.slow, pytest.mark.needs_torch]


def test_four_streams_are_measured_and_every_token_is_counted(tmp_path: Path) -> None:
    work = ["--num-prompts", "4", "--prompt-tokens", "8-12", "--output-tokens", "5", "--rounds", "1", "--client-processes", "2"]
    engine = ["--num-kv-blocks", "64", "--max-num-seqs", "4", "--max-model-len", "256"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", *work, *engine, "--usage-each", "--json", str(tmp_path / "a.json")])
    assert not ended.value.code
    run = read_results(tmp_path / "a.json")
    (point,) = run.points
    assert (run.facts["model"], run.facts["hidden_size"], run.facts["num_hidden_layers"]) == ("SmolLM2-135M-Instruct", 576, 30)
    assert point["num_output_tokens"] == Spread(20, (20.0,))
    numbers = [point[name] for name in ("first_token_p50_ms", "inter_token_p50_ms", "end_to_end_p99_s", "output_tokens_per_s")]
    assert all(isinstance(number, Spread) and number.value > 0 for number in numbers)
