"""Decode steps whose rows share a prefix, on tensors of the CPU."""

from __future__ import annotations

import pytest

from support.triton_interpreter import run_interpreted


def test_a_shared_prefix_in_the_runtimes_attention() -> None:
    run_interpreted("decode_graphs.py", "-m", "not slow")


@pytest.mark.slow
def test_steps_that_share_a_prefix_equal_rows_alone() -> None:
    run_interpreted("decode_graphs.py", "-m", "slow")
