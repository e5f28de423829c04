"""Kernel checks under Triton's interpreter, on CPU tensors.

Triton decides when it is imported whether kernels are interpreted, and compile tests of the same run need them compiled:
so a file of checks (tests/kernels/interpreted/*.py, plain pytest functions) runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CHECKS = ROOT / "tests" / "kernels" / "interpreted"
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""What pyproject.toml has settings for, and what the checks use; to import all that are installed takes longer than some checks."""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform")


def run_interpreted(file_name: str, *pytest_args: str) -> None:
    """Runs the checks of one file of tests/kernels/interpreted; fails with their report if one of them fails or none ran."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "adapters", "tests")),
    }
    plugins = [argument for name in ("no:cacheprovider", *PLUGINS) for argument in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(CHECKS / file_name), *pytest_args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
