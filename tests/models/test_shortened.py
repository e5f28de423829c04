"""A shortened decoder runs one layer of each kind and the last one, and is whole again after."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedcore.models.decoder import Decoder
from support.dense_attention import DenseAttention
from support.quantized_checkpoints import awq, is_projection, make_pair
from support.tiny_models import load, make_checkpoint, prompt_ids, run

WINDOW, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that attend, in their order."""
    layers: list[int] = []
    attend = DenseAttention.attend

    def note(self: DenseAttention, layer: int, *args: object, **options: object) -> object:
        layers.append(layer)
        return attend(self, layer, *args, **options)

    monkeypatch.setattr(DenseAttention, "attend", note)
    return layers


def layers_met(decoder: Decoder, met: list[int]) -> list[int]:
    met.clear()
    run(decoder, prompt_ids(12))
    return list(met)


@pytest.mark.parametrize(("num_layers", "short"), [(1, [0]), (2, [0, 1]), (5, [0, 4])])
def test_of_layers_alike_the_first_and_the_last_run(num_layers: int, short: list[int], tmp_path: Path, met: list[int]) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=num_layers)
    decoder = load(tmp_path)
    with decoder.shortened():
        assert layers_met(decoder, met) == short
    assert layers_met(decoder, met) == list(range(num_layers))


def test_layers_with_and_without_a_window_run(tmp_path: Path, met: list[int]) -> None:
    kinds = [FULL, FULL, WINDOW, WINDOW, FULL]
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=5, layer_types=kinds, sliding_window=8, use_sliding_window=True)
    decoder = load(tmp_path)
    with decoder.shortened():
        layers = layers_met(decoder, met)
    assert sorted(layers[:-1]) == [0, 2]
    assert layers[-1] == 4


def test_packed_and_plain_layers_run(tmp_path: Path, met: list[int]) -> None:
    pair = make_pair(tmp_path, awq(), num_hidden_layers=4, packs=lambda module: is_projection(module) and ".layers.1." in module)
    decoder = load(pair.packed)
    with decoder.shortened():
        layers = layers_met(decoder, met)
    assert sorted(layers[:-1]) == [0, 1]
    assert layers[-1] == 3


def test_a_failure_leaves_the_decoder_whole(tmp_path: Path, met: list[int]) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    decoder = load(tmp_path)
    with pytest.raises(ZeroDivisionError), decoder.shortened():
        raise ZeroDivisionError
    assert layers_met(decoder, met) == [0, 1, 2]
