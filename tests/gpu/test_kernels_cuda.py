"""The pointwise and sampling kernels on CUDA, against their references: all dtypes, large pools, graphs, chains of dependent launches."""

from __future__ import annotations

import math

import pytest
import torch

from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels import mask_tokens
from pagedcore_kernels.reference import rms_norm as norm_reference
from pagedcore_kernels.reference.sample_tokens import STATUS_ALL_MASKED, STATUS_NOT_FINITE
from pagedcore_kernels.reference.step_inputs import DecodeInputs
from pagedcore_kernels.triton_ops import norms
from pagedcore_kernels.triton_ops.activation import silu_mul
from pagedcore_kernels.triton_ops.rotary_kv import rotate_and_write_kv
from pagedcore_kernels.triton_ops.sampling import sample_tokens
from pagedcore_kernels.triton_ops.step_inputs import prepare_decode_inputs, write_sampled
from support import pointwise_checks as checks
from support import sampler_checks
from support.draw_checks import RowSettings, check_draws, settings_tensors
from support.noise_checks import check_noise

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
KINDS = [
    RowSettings(temperature=0.0),
    RowSettings(),
    RowSettings(temperature=0.6, top_k=20, top_p=0.95),
    RowSettings(temperature=0.6, top_k=20),
    RowSettings(top_k=1),
    RowSettings(top_k=500, top_p=0.9),
    RowSettings(top_k=5000, top_p=0.9),
    RowSettings(top_k=100000),
    RowSettings(top_p=0.95),
    RowSettings(top_p=0.2, temperature=1.5),
    RowSettings(min_p=0.05),
    RowSettings(min_p=0.01, top_p=0.8, temperature=2.0),
    RowSettings(top_k=50, min_p=0.1, top_p=0.9),
]


@DTYPES
@pytest.mark.parametrize("shape", [(5, 123), (1, 1024), (128, 4096), (3, 7, 18), (2048, 128), (33, 5120), (17, 16384), (0, 64)])
def test_norms_equal_their_references(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_norms(shape, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "dim"), [(5, 123), (1, 4096), (16, 4096), (17, 2048), (33, 5120), (128, 4096), (700, 4096), (17, 16384), (0, 64)]
)
def test_norms_may_come_in_another_order(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    checks.check_norms_in_order(num_rows, dim, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 24, 128), (300, 5, 80)])
def test_norm_takes_heads_at_any_stride(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    checks.check_norm_of_heads(num_tokens, num_heads, head_dim, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize(("num_rows", "width"), [(5, 123), (1, 3072), (128, 11008), (1000, 24)])
def test_silu_mul_equals_its_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    checks.check_silu_mul(num_rows, width, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 129])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 80), (16, 8, 128), (32, 32, 96), (3, 3, 64), (4, 1, 256)])
def test_rotary_kv_equals_its_reference(num_heads, num_kv_heads, head_dim, num_tokens, has_norm, dtype) -> None:
    checks.check_rotary_kv(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        has_norm=has_norm,
        num_blocks=40,
        device="cuda",
    )


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rotary_kv_writes_caches_of_eight_bits(cache_dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need sm_89")
    checks.check_rotary_kv(
        num_tokens=20,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        dtype=torch.bfloat16,
        has_norm=True,
        num_blocks=10,
        cache_dtype=cache_dtype,
        device="cuda",
    )


def test_rotary_kv_reaches_slots_beyond_32_bits() -> None:
    """The last slots of a pool of 4.3e9 elements."""
    checks.check_rotary_kv(
        num_tokens=40, num_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, has_norm=True, num_blocks=131100, device="cuda"
    )


@pytest.mark.parametrize("num_sequences", [1, 7, 256])
@pytest.mark.parametrize("block_size", [16, 24])
def test_decode_inputs_equal_their_reference(num_sequences: int, block_size: int) -> None:
    rows = torch.randperm(300)[:num_sequences].tolist()
    rows[3::5] = [-1] * len(rows[3::5])
    checks.check_decode_inputs(num_rows=300, rows=rows, max_blocks=1300, block_size=block_size, device="cuda")


@pytest.mark.parametrize("first_id", [0, 2**31 - 2_000_001])
def test_noise_is_that_of_the_reference(first_id: int) -> None:
    check_noise(2_000_000, first_id, "cuda")


def logits_of(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator, device="cuda") * scale).to(dtype)


@DTYPES
@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize(("vocab_size", "copies"), [(151936, 1), (32000, 4), (50257, 4), (1000, 20)])
def test_every_kind_of_row_draws_what_the_reference_draws(vocab_size: int, copies: int, scale: float, dtype: torch.dtype) -> None:
    rows = [RowSettings(**{**vars(kind), "seed": 7 * index + 1, "output_index": index}) for index, kind in enumerate(KINDS * copies)]
    logits = logits_of(len(rows), vocab_size, dtype, seed=vocab_size, scale=scale)
    assert check_draws(logits, rows) <= len(rows) // 10


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_alone_draws_what_the_reference_draws(kind: RowSettings) -> None:
    for seed in range(4):
        logits = logits_of(1, 151936, torch.bfloat16, seed=seed, scale=3.0)
        check_draws(logits, [RowSettings(**{**vars(kind), "seed": seed})])


def test_draws_equal_those_of_the_runtime_on_a_cpu() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=3, top_k=7),
        SamplingParams(seed=4, top_k=100, top_p=0.7),
        SamplingParams(seed=5, top_p=0.5),
        SamplingParams(seed=7, min_p=0.2),
        SamplingParams(seed=10, temperature=0.3, min_p=0.05, top_k=30, top_p=0.9),
    ] * 10
    logits = logits_of(len(params), 5000, torch.float32, seed=1, scale=2.0)
    rows = [RowSettings(p.temperature, p.top_k, p.top_p, p.min_p, p.seed or 0) for p in params]
    drawn = sample_tokens(logits, **settings_tensors(rows, "cuda"))
    assert drawn.token_ids.tolist() == sampler_checks.tokens(logits, params)


def test_status_names_rows_without_a_choice() -> None:
    logits = logits_of(6, 151936, torch.bfloat16, seed=0, scale=2.0)
    logits[1, 77777] = math.nan
    logits[2] = math.nan
    logits[3, 5] = math.inf
    logits[4] = -math.inf
    settings = settings_tensors([RowSettings(seed=index, top_k=20 * (index % 2), top_p=0.9) for index in range(6)], "cuda")
    drawn = sample_tokens(logits, **settings, is_masked=True)
    assert drawn.status.tolist() == [0, STATUS_NOT_FINITE, STATUS_NOT_FINITE, STATUS_NOT_FINITE, STATUS_ALL_MASKED, 0]
    assert bool(((drawn.token_ids >= 0) & (drawn.token_ids < 151936)).all())


def test_masks_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(130, 151_937, generator=generator)
    rows = torch.randperm(130, generator=generator)[:100]
    words = torch.randint(-(2**31), 2**31, (100, 4749), generator=generator).to(torch.int32)
    on_device = logits.cuda()
    mask_tokens(on_device, rows.cuda(), words.cuda())
    mask_tokens(logits, rows, words)
    assert torch.equal(on_device.cpu(), logits)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_op_makes_the_host_wait_and_a_graph_replays_them_all() -> None:
    """A step's kernels in a row, captured once and replayed on new contents, give what they give outside a graph."""
    step = _Step()
    step.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(5):
        step.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in captured]
        step.fill(seed)
        for actual, expected in zip(replayed, step.run(), strict=True):
            assert torch.equal(actual, expected)


class _Step:
    """Buffers of a small decode step, and its kernels one after another without the products between."""

    def __init__(self) -> None:
        self.hidden, self.residual = (torch.empty(8, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.weight = torch.rand(1024, device="cuda").bfloat16()
        self.cache = torch.zeros(512, 16, 4, 128, dtype=torch.bfloat16, device="cuda")
        self.cos_sin = torch.rand(1024, 128, device="cuda").bfloat16()
        self.tokens = torch.zeros(8, 1024, dtype=torch.int32, device="cuda")
        self.table = torch.arange(512, dtype=torch.int32, device="cuda").view(8, 64)
        self.lengths = torch.empty(8, dtype=torch.int32, device="cuda")
        self.rows = torch.tensor([3, 1, -1, 0, 7, -1, 5, 2], device="cuda")
        self.inputs = DecodeInputs.allocate(8, 64, "cuda")
        self.settings = settings_tensors([RowSettings(**{**vars(kind), "seed": index}) for index, kind in enumerate(KINDS[:8])], "cuda")
        self.fill(0)

    def fill(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in (self.hidden, self.residual):
            tensor.normal_(generator=generator)
        self.lengths.random_(1, 100, generator=generator)
        self.tokens.zero_()
        self.cache.zero_()

    def run(self) -> list[torch.Tensor]:
        prepare_decode_inputs(self.tokens, self.table, self.lengths, self.rows, block_size=16, out=self.inputs)
        normed = norms.add_rms_norm(self.hidden, self.residual, self.weight, eps=1e-6)
        caches = self.cache[:, :, :2], self.cache[:, :, 2:]
        inputs = self.inputs
        query = rotate_and_write_kv(normed.view(8, 8, 128), self.cos_sin, inputs.positions, inputs.slot_mapping, *caches, num_heads=4)
        gated = silu_mul(query.view(8, 512))
        drawn = sample_tokens(gated, **self.settings)
        write_sampled(drawn.token_ids, self.rows, inputs.positions, self.tokens, self.lengths)
        return [self.residual, self.cache, query, gated, drawn.token_ids, drawn.status, self.tokens, self.lengths, inputs.slot_mapping]


def test_a_long_chain_of_dependent_launches_keeps_its_order() -> None:
    """Each link reads what the one before wrote; 300 links in one graph, replayed, equal the same links run one by one."""
    for num_rows in (1, 128):
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16()
        weight = (torch.rand(1024, device="cuda") + 0.5).bfloat16()
        residual, start = torch.zeros_like(x), torch.randn_like(x)

        def link(value: torch.Tensor, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> torch.Tensor:
            return norms.add_rms_norm(value, residual, weight, eps=1e-6)

        residual.copy_(start)
        value = x
        for _ in range(300):
            value = link(value)
            torch.cuda.synchronize()
        expected = value, residual.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = x
            for _ in range(300):
                value = link(value)
        for _ in range(5):
            residual.copy_(start)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(value, expected[0])
            assert torch.equal(residual, expected[1])


def test_a_kernel_reads_what_torch_wrote_just_before() -> None:
    weight = torch.ones(1024, device="cuda").bfloat16()
    for seed in range(50):
        x = torch.randn(64, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()
        weight.normal_()
        actual = norms.rms_norm(x, weight, eps=1e-6)
        checks.assert_equal(actual, norm_reference.rms_norm(x, weight, eps=1e-6))
