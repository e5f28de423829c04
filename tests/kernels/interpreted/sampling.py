"""The sampling kernels under the interpreter: the reference's token, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.runtime import sampler
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.reference import sample_tokens as reference
from pagedcore_kernels.triton_ops.sampling import SamplingLaunch, choose_sampling_launch, sample_tokens
from support import sampler_checks
from support.draw_checks import RowSettings, check_draws, settings_tensors
from support.noise_checks import check_noise

MANY_SLICES = {"slice_size": 256, "group_size": 64}


def normal(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def every_kind() -> list[RowSettings]:
    """Every way through the kernel, for a vocabulary of 1,500 in groups of 64."""
    kinds = [
        RowSettings(temperature=0.0),
        RowSettings(),
        RowSettings(temperature=0.3, top_k=1),
        RowSettings(top_k=7),
        RowSettings(top_k=20, top_p=0.7, temperature=0.6),
        RowSettings(top_k=40, min_p=0.05),
        RowSettings(top_k=1499, top_p=0.9, temperature=3.0),
        RowSettings(top_k=5000),
        RowSettings(top_k=1500, top_p=0.6),
        RowSettings(top_p=0.3),
        RowSettings(top_p=0.95, temperature=1.5),
        RowSettings(min_p=0.2),
        RowSettings(min_p=1.0, top_p=0.5),
        RowSettings(top_p=1e-6),
        RowSettings(top_p=0.9, min_p=0.01, top_k=23, temperature=2.0),
    ]
    return [RowSettings(**{**vars(kind), "seed": index - 2, "output_index": 3 * index}) for index, kind in enumerate(kinds)]


@pytest.mark.parametrize("first_id", [0, 151000, 2**31 - 3000])
def test_noise_is_that_of_the_reference(first_id: int) -> None:
    check_noise(2500, first_id)


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, None), (torch.float16, 2.0)], ids=["distinct", "tied"])
def test_every_kind_of_row_draws_what_the_reference_draws(dtype: torch.dtype, step: float | None) -> None:
    rows = every_kind()
    logits = normal(len(rows), 1500)
    logits = logits if step is None else (logits * step).round() / step
    assert check_draws(logits.to(dtype), rows, SamplingLaunch(1500, **MANY_SLICES)) == 0


@pytest.mark.parametrize(
    "kind",
    [
        RowSettings(top_k=3),
        RowSettings(min_p=0.99),
        RowSettings(top_k=50, min_p=0.99),
        RowSettings(top_p=0.0117),
        RowSettings(top_k=10, top_p=0.35),
        RowSettings(top_k=10, top_p=0.35, min_p=0.994),
        RowSettings(top_p=0.2, min_p=0.97),
    ],
)
def test_kept_tokens_are_the_reference_s_to_the_last_one(kind: RowSettings) -> None:
    """So hot that every kept token is about as likely, so that among so many seeds one too many or too few shows."""
    rows = [RowSettings(**{**vars(kind), "temperature": 100.0, "seed": seed}) for seed in range(14)]
    logits = (normal(1, 300) * 4).round() / 4
    assert check_draws(logits.repeat(14, 1), rows, SamplingLaunch(300, 128, 64)) == 0


@pytest.mark.parametrize("kind", [RowSettings(top_k=3), RowSettings(top_k=4, top_p=0.6), RowSettings(top_k=5, min_p=0.995)])
def test_kept_tokens_of_a_row_of_ties_are_the_reference_s_to_the_last_one(kind: RowSettings) -> None:
    """More tokens are tied than are collected, so they are counted over the whole row."""
    rows = [RowSettings(**{**vars(kind), "temperature": 100.0, "seed": seed}) for seed in range(12)]
    logits = torch.zeros(1, 1200)
    logits[:, 1100] = 1.0
    assert check_draws(logits.repeat(12, 1), rows) == 0


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, list[RowSettings]]:
    vocab_size = draw(st.integers(1, 1000))
    row = st.builds(
        RowSettings,
        temperature=st.sampled_from([0.0, 9e-6, 1e-5, 0.1, 0.7, 1.0, 5.0, 100.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 3, 15, 16, 17, 50, 999, 2000]),
        top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-3]),
        min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
        seed=st.integers(-(2**63), 2**63 - 1),
        output_index=st.integers(0, 2**20),
    )
    rows = draw(st.lists(row, min_size=1, max_size=3))
    logits = normal(len(rows), vocab_size, draw(st.integers(0, 2**31)), draw(st.sampled_from([0.01, 1.0, 8.0])))
    step = draw(st.sampled_from([None, 1.0, 4.0]))
    logits = logits if step is None else (logits * step).round() / step
    masked = draw(st.sampled_from([0.0, 0.0, 0.5]))
    is_masked = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < masked
    is_masked[:, 0] = False
    return logits.masked_fill(is_masked, -math.inf), rows


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problems())
def test_any_row_draws_what_the_reference_draws(problem: tuple[torch.Tensor, list[RowSettings]]) -> None:
    logits, rows = problem
    check_draws(logits, rows, SamplingLaunch(logits.shape[1], **MANY_SLICES))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(problems())
def test_any_of_many_rows_draws_what_the_reference_draws(problem: tuple[torch.Tensor, list[RowSettings]]) -> None:
    logits, rows = problem
    check_draws(logits, rows, SamplingLaunch(logits.shape[1], **MANY_SLICES))


def test_a_top_k_above_the_number_of_groups_is_bisected_over_the_whole_row() -> None:
    rows = [RowSettings(top_k=1500, top_p=0.5, seed=4), RowSettings(top_k=100, temperature=100.0, seed=5)]
    assert check_draws((normal(2, 3000) * 4).round() / 4, rows) == 0


def test_zeros_of_both_signs_are_tied() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]]).repeat(8, 1)
    assert check_draws(logits, [RowSettings(top_k=2, seed=seed) for seed in range(8)]) == 0
    tokens = sample_tokens(logits, **settings_tensors([RowSettings(top_k=2, seed=seed) for seed in range(8)])).token_ids
    assert set(tokens.tolist()) == {0, 1}


def test_rows_at_a_stride_are_read_where_they_are() -> None:
    logits = normal(4, 700)[::2, 100:]
    assert check_draws(logits, [RowSettings(seed=1), RowSettings(temperature=0.0)]) == 0


@pytest.mark.filterwarnings("ignore:(All-NaN slice|invalid value) encountered:RuntimeWarning")
def test_status_names_rows_without_a_choice_and_their_tokens_stay_in_range() -> None:
    logits = normal(6, 300)
    logits[1, 250] = math.nan
    logits[2] = math.nan
    logits[3, 4] = math.inf
    logits[4] = -math.inf
    rows = [RowSettings(seed=index, top_k=3 * (index % 2), top_p=0.9) for index in range(6)]
    launch = SamplingLaunch(300, **MANY_SLICES)
    for is_masked, last in ((False, reference.STATUS_NOT_FINITE), (True, reference.STATUS_ALL_MASKED)):
        drawn = sample_tokens(logits, **settings_tensors(rows), is_masked=is_masked, launch=launch)
        assert drawn.status.tolist() == [0, 1, 1, 1, last, 0]
        assert drawn.status.tolist() == reference.sample_tokens(logits, **settings_tensors(rows), is_masked=is_masked).status.tolist()
        assert bool(((drawn.token_ids >= 0) & (drawn.token_ids < 300)).all())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_quotients_beyond_float32_leave_the_largest_logit() -> None:
    logits = torch.full((2, 300), -1e36)
    logits[:, 270] = 1e36
    rows = [RowSettings(temperature=1e-5), RowSettings(temperature=1e-5, top_k=3)]
    drawn = sample_tokens(logits, **settings_tensors(rows), launch=SamplingLaunch(300, **MANY_SLICES))
    assert drawn.token_ids.tolist() == [270, 270]


def test_greedy_rows_alone_need_no_drawing_code_and_take_the_lowest_of_tied_ids() -> None:
    logits = torch.zeros(3, 600)
    logits[1, 599] = 1.0
    logits[2, [257, 400, 30]] = 5.0
    rows = [RowSettings(temperature=0.0)] * 3
    launch = SamplingLaunch(600, **MANY_SLICES)
    for may_draw in (False, True):
        assert sample_tokens(logits, **settings_tensors(rows), may_draw=may_draw, launch=launch).token_ids.tolist() == [0, 599, 30]


def test_a_draw_does_not_depend_on_how_the_row_is_cut_nor_on_its_neighbours() -> None:
    rows = every_kind()
    logits = normal(len(rows), 1500)
    cuts = [SamplingLaunch(1500, 512, 128), choose_sampling_launch(1500, 1)]
    together = [sample_tokens(logits, **settings_tensors(rows), launch=cut).token_ids.tolist() for cut in cuts]
    assert together[0] == together[1]
    for index in (4, 9):
        alone = sample_tokens(logits[index : index + 1], **settings_tensors(rows[index : index + 1])).token_ids
        assert alone.tolist() == [together[0][index]]


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_the_runtimes_sampler_draws_by_the_kernel_what_it_draws_in_torch(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of setting, with penalties, bias and a masked row; where kernels run, nothing is ordered."""
    logits, params = sampler_checks.mixed_rows(vocab_size)
    logits[1] = -math.inf
    logits[2, 3] = math.nan
    history = [[index % vocab_size, 4, 4] for index in range(12)]
    expected = sampler_checks.sample(logits, params, outputs=history)
    monkeypatch.setattr(sampler, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(sampler, "order_candidates", lambda *_: pytest.fail("the vocabulary is ordered"))
    drawn = sampler_checks.sample(logits, params, outputs=history)
    assert drawn.status.tolist() == expected.status.tolist() == [0, 1, 1] + [0] * 9
    assert drawn.token_ids[3:].tolist() == expected.token_ids[3:].tolist()


def test_the_runtimes_sampler_names_a_row_whose_tokens_are_all_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uses_triton", lambda tensor: True)
    logits, masked = normal(2, 10), SamplingParams(seed=1, min_tokens=4)
    drawn = sampler_checks.sample(logits, [masked, SamplingParams(seed=1)], stop_ids=frozenset(range(10)))
    assert drawn.status.tolist() == [2, 0]
