"""The noise is a pure function of (seed, output index, token id), uniform and independent as far as statistics can tell."""

from __future__ import annotations

import math

import torch

from pagedcore_kernels import gumbel_noise, wrap_seed

M64, M32 = (1 << 64) - 1, (1 << 32) - 1


def plain_uniform(seed: int, index: int, token: int) -> float:
    """The documented formula in Python integers."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
        return x ^ (x >> 16)

    key = mix64((mix64(seed & M64) + index * 0x9E3779B97F4A7C15) & M64)
    h = mix32((mix32((token * 0x9E3779B1 + (key & M32)) & M32) + (key >> 32)) & M32)
    return ((h & 0x7FFFFFFF) + 0.5) / 2**31


def uniforms(seeds: torch.Tensor, indices: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    noise = gumbel_noise(seeds, indices, ids).double()
    return 1.0 - torch.exp(-torch.exp(-noise))


def chi_square(values: torch.Tensor, num_bins: int) -> float:
    counts = torch.histc(values, bins=num_bins, min=0.0, max=1.0)
    expected = values.numel() / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_noise_equals_the_documented_formula() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 12345]
    indices = [0, 1, 7, 1000, 5, 0, 131071]
    ids = [0, 1, 2, 31999, 151935, 2**31 - 1]
    noise = gumbel_noise(torch.tensor([wrap_seed(s) for s in seeds]), torch.tensor(indices), torch.tensor(ids))
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        for column, token in enumerate(ids):
            expected = -math.log(-math.log1p(-plain_uniform(seed, index, token)))
            assert math.isclose(float(noise[row, column]), expected, rel_tol=1e-5, abs_tol=1e-5)


def test_noise_of_a_token_does_not_depend_on_what_else_is_asked_for() -> None:
    seeds, indices = torch.tensor([3, 4]), torch.tensor([0, 9])
    whole = gumbel_noise(seeds, indices, torch.arange(500))
    some = torch.tensor([[7, 3], [499, 0]])
    assert torch.equal(gumbel_noise(seeds, indices, some), whole.gather(1, some))
    assert torch.equal(gumbel_noise(seeds[1:], indices[1:], torch.arange(500)), whole[1:])


def test_noise_is_uniform_over_tokens_seeds_and_indices() -> None:
    """Each bound is beyond the 99.99 % quantile of 99 degrees of freedom."""
    ids, one = torch.arange(100_000), torch.tensor([11])
    assert chi_square(uniforms(one, torch.tensor([0]), ids), 100) < 161
    many = torch.arange(100_000)
    assert chi_square(uniforms(many, torch.zeros_like(many), torch.tensor([5])), 100) < 161
    assert chi_square(uniforms(torch.full_like(many, 42), many, torch.tensor([5])), 100) < 161


def test_neighbouring_keys_are_independent() -> None:
    """Joint 10 x 10 histograms of the noise at neighbouring indices, seeds and tokens are flat."""
    ids = torch.arange(100_000)
    base = uniforms(torch.tensor([3, 3, 4]), torch.tensor([0, 1, 0]), ids)
    for first, second in ((base[0], base[1]), (base[0], base[2]), (base[0, :-1], base[0, 1:])):
        cells = (first * 10).long().clamp(max=9) * 10 + (second * 10).long().clamp(max=9)
        counts = torch.bincount(cells, minlength=100).double()
        expected = cells.numel() / 100
        assert float(((counts - expected) ** 2 / expected).sum()) < 161


def test_noise_is_always_finite() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(20), torch.arange(50_000))
    assert bool(noise.isfinite().all())
    assert float(noise.max()) > 11.0, "the far tail exists"
