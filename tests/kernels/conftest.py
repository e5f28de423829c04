"""Tests of Triton kernels are collected where triton can be imported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]
