"""Steps of decode graphs under the interpreter: what a graph would replay is computed anew each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedcore.batch import AttentionSpec, ElementOrder, KVLayout, Rotation
from pagedcore.runtime import decode_graphs, shared_prefix, triton_attention
from pagedcore.runtime.decode_graphs import DecodeGraphs, GraphOutput
from pagedcore.runtime.kv_cache import KVCache
from pagedcore.runtime.model_runner import ModelRunner
from pagedcore.runtime.triton_attention import PagedSequences, Prefill, PrefillRun, PrefixKeys, TritonAttention
from pagedcore_kernels import take_columns
from pagedcore_kernels.triton_ops import attention_settings
from support import runner_checks
from support.runner_driver import make_runner
from support.tiny_model import TinyModel


class Recomputed:
    """Stands for a CUDA graph."""

    def __init__(self, step: Callable[[], GraphOutput], output: GraphOutput) -> None:
        self._step = step
        self._output = output

    def replay(self) -> None:
        for kept, new in zip(fields(self._output), fields(self._step()), strict=True):
            kept.copy_(new)


def fields(output: GraphOutput) -> tuple[torch.Tensor, ...]:
    return output.logits, output.token_ids, output.status, output.positions


class Recorder:
    """Stands for GraphRecorder."""

    def __init__(self, device: torch.device, shortened: Callable[[], object]) -> None:
        assert device.type == "cpu"
        assert shortened

    def record(self, step: Callable[[], GraphOutput]) -> tuple[Recomputed, GraphOutput]:
        output = step()
        return Recomputed(step, output), output


def runner_with_graphs(model: TinyModel, **options: int) -> ModelRunner:
    """Prompts by torch, decode steps by the kernels."""
    runner = make_runner(model, **options)
    graphs = DecodeGraphs(model, runner._cache, runner._buffers, sizes=[4], max_model_len=512)
    with torch.inference_mode():
        graphs.capture()
    runner._graphs = graphs
    return runner


@pytest.mark.slow
def test_rows_that_share_a_prefix_equal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "GraphRecorder", Recorder)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(shared_prefix, "PADDING_ROW_BYTES", 0)
    monkeypatch.setattr(runner_checks, "make_runner", runner_with_graphs)
    runner_checks.check_rows_that_share_a_prefix_equal_alone("cpu")


def attend(
    prefix: PrefixKeys | None, sliding_window: int | None, order: ElementOrder | None = None, prefill: Prefill | None = None
) -> torch.Tensor:
    """Two rows of 40 and 31 tokens, the first of blocks 0, 1, ..., the second of blocks 10, 11, ...; heads are unturned."""
    generator = torch.Generator().manual_seed(3)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16)
    cache = KVCache(layout, num_blocks=20, block_size=8, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.normal_(generator=generator)
    sequences = PagedSequences(
        slot_mapping=torch.tensor([4 * 8 + 7, 13 * 8 + 6]),
        block_tables=torch.arange(20, dtype=torch.int32).view(2, 10),
        seq_lens=torch.tensor([40, 31], dtype=torch.int32),
        max_seq_len=80,
        prefill=prefill,
        prefix=prefix,
    )
    half = torch.ones(1, 8)
    still = torch.zeros(2, dtype=torch.int64)
    rotation = Rotation(
        cos_sin=torch.cat((half, half * 0), 1), positions=still, cos=None, sin=None, query_norm=None, key_norm=None, eps=0.0
    )
    qkv = torch.randn(2, 4, 16, generator=generator)
    spec = AttentionSpec(layer=0, num_heads=2, scale=0.25, sliding_window=sliding_window, out_order=order)
    return TritonAttention(sequences, cache).attend(qkv, rotation, spec)


def prefix_keys(first_block: int, lens: list[int]) -> PrefixKeys:
    return PrefixKeys(torch.arange(first_block, first_block + 10, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), 80)


def test_the_keys_of_a_prefix_take_the_place_of_a_rows_own() -> None:
    plain = attend(None, None)
    torch.testing.assert_close(attend(prefix_keys(0, [32, 0]), None), plain)
    torch.testing.assert_close(attend(prefix_keys(0, [0, 0]), None), plain)
    other = attend(prefix_keys(0, [32, 24]), None)
    torch.testing.assert_close(other[0], plain[0])
    assert not torch.allclose(other[1], plain[1], atol=0.01)


def test_a_layer_with_a_window_reads_each_rows_own_keys() -> None:
    assert torch.equal(attend(prefix_keys(0, [32, 24]), 20), attend(None, 20))


ALL_PROMPTS = Prefill(torch.tensor([0, 1, 2], dtype=torch.int32), 0, [PrefillRun(0, 2, 1)])
BEHIND_ONE_ROW = Prefill(torch.tensor([0, 1, 2], dtype=torch.int32), 1, [PrefillRun(1, 2, 1)])
IN_A_GRAPH = Prefill(torch.tensor([1, 1, 2], dtype=torch.int32), 2, [PrefillRun(0, 2, 1)], torch.tensor([40, 0], dtype=torch.int32))


@pytest.mark.parametrize("most_stored", [0, 1, 2])
@pytest.mark.parametrize(
    ("prefix", "prefill", "num_decodes"),
    [(None, None, 2), (prefix_keys(0, [32, 0]), None, 2), (None, ALL_PROMPTS, 0), (None, BEHIND_ONE_ROW, 1), (None, IN_A_GRAPH, 0)],
    ids=["rows", "prefix", "prompts", "both", "graph"],
)
def test_elements_come_in_the_order_asked_for(
    prefix: PrefixKeys | None, prefill: Prefill | None, num_decodes: int, most_stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the kernel stores them so, or a launch puts them in order, or the one for the first rows and the other behind them."""
    reordered: list[int] = []

    def noting(x: torch.Tensor, order: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        reordered.append(len(x))
        return take_columns(x, order, out=out)

    monkeypatch.setattr(triton_attention, "take_columns", noting)
    monkeypatch.setattr(attention_settings, "MAX_STORED_IN_ORDER", most_stored)
    order = ElementOrder.of(torch.randperm(32, generator=torch.Generator().manual_seed(1)).int())
    torch.testing.assert_close(attend(prefix, None, order, prefill), attend(None, None)[:, order.taken.long()])
    num_stored = num_decodes if num_decodes <= most_stored else 0
    assert reordered == [2 - num_stored] * (num_stored < 2)
