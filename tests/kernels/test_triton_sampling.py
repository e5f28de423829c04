"""The sampling kernels: interpreted checks, compiled for every card, how a row is cut."""

from __future__ import annotations

import pytest
import torch

from pagedcore_kernels.triton_ops.sampling import SamplingLaunch, choose_sampling_launch, sample_tokens
from support.draw_checks import RowSettings, settings_tensors
from support.triton_compile import CAPABILITIES, SMALL_SHARED_BYTES, compile_op
from support.triton_interpreter import run_interpreted


@pytest.mark.slow
def test_kernels_draw_what_the_reference_draws_under_the_interpreter() -> None:
    run_interpreted("sampling.py", "-m", "not slow")


@pytest.mark.slow
def test_kernels_draw_what_the_reference_draws_in_many_random_cases() -> None:
    run_interpreted("sampling.py", "-m", "slow")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_every_card(capability: int) -> None:
    check_compiles(capability, num_rows=1, vocab_size=151936, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("num_rows", "vocab_size", "dtype"), [(128, 32000, torch.float32), (16, 49157, torch.float16)])
def test_other_shapes_and_dtypes_compile_for_every_card(capability: int, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    check_compiles(capability, num_rows=num_rows, vocab_size=vocab_size, dtype=dtype)


def check_compiles(capability: int, *, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.empty(num_rows, vocab_size, dtype=dtype)
    settings = settings_tensors([RowSettings()] * num_rows)
    read, choose = compile_op(lambda: sample_tokens(logits, **settings), capability)
    assert (read.name, choose.name) == ("_read_slices", "_choose")
    assert read.stack_bytes == 0
    assert choose.stack_bytes <= 64, "a few registers may spill in the paths over the whole row"
    assert choose.shared_bytes <= SMALL_SHARED_BYTES


def test_greedy_kernels_are_small() -> None:
    logits = torch.empty(1, 151936, dtype=torch.bfloat16)
    compiled = compile_op(lambda: sample_tokens(logits, **settings_tensors([RowSettings()]), may_draw=False), 90)
    assert all(kernel.num_registers <= 64 and kernel.stack_bytes == 0 for kernel in compiled)


def test_one_kernel_serves_settings_wherever_they_begin_in_memory() -> None:
    """A second variant would be compiled when a request first meets it."""
    logits, settings = torch.empty(1, 2048, dtype=torch.bfloat16), settings_tensors([RowSettings()] * 2)
    aligned, unaligned = ({name: values[row : row + 1] for name, values in settings.items()} for row in (0, 1))
    assert all(values.data_ptr() % 16 for values in unaligned.values())
    made = [compile_op(lambda part=part: sample_tokens(logits, **part, may_draw=False), 90) for part in (aligned, unaligned)]
    assert [kernel.ptx for kernel in made[0]] == [kernel.ptx for kernel in made[1]]


def test_few_rows_are_cut_into_enough_slices_to_use_the_whole_card() -> None:
    launch = choose_sampling_launch(151936, 1)
    assert launch == SamplingLaunch(151936, slice_size=1024, group_size=256)
    assert (launch.num_slices, launch.num_groups) == (149, 594)
    assert choose_sampling_launch(151936, 128).num_slices == 38


@pytest.mark.parametrize("vocab_size", [1, 64, 50257, 151936, 262144, 500000, 2**21])
def test_groups_are_whole_parts_of_slices_and_no_more_than_fit(vocab_size: int) -> None:
    for num_rows in (1, 200):
        launch = choose_sampling_launch(vocab_size, num_rows)
        assert launch.slice_size % launch.group_size == 0
        assert launch.num_groups <= 1024
        assert launch.num_slices * launch.slice_size >= vocab_size


def test_settings_of_another_number_of_rows_are_refused() -> None:
    logits = torch.zeros(2, 10)
    with pytest.raises(ValueError, match="each setting of its 2 rows"):
        sample_tokens(logits, **settings_tensors([RowSettings()] * 3))
    with pytest.raises(ValueError, match="must be contiguous"):
        sample_tokens(torch.zeros(10, 2).T, **settings_tensors([RowSettings()] * 2))
