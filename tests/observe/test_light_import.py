"""Counting needs no prometheus_client until a recorder is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_observe_loads_no_prometheus_client() -> None:
    code = (
        "import sys, pagedcore.observe.recorder, pagedcore.observe.exposition, pagedcore.observe.stats\n"
        "print([m for m in ('prometheus_client', 'torch', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"
