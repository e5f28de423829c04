# ruff: noqa: E402
"""Which tile and how many splits a product with packed weights gets, beside what was measured on an H200."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from support.triton_interpreter import needs_triton

pytestmark = needs_triton
pytest.importorskip("triton")

from bench.kernels.w4_fit import code_of, fit, score
from bench.kernels.w4_results import H200, KEPT, Place, matrix, read
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.packed_settings import (
    _SMALL_TILES,
    LARGE_TILES,
    ROW_BUCKETS,
    FewRowsConfig,
    ManyRowsConfig,
    ProductSize,
    Tile,
    choose_packed_config,
    multiplies_packed,
    product_us,
)
from pagedcore_kernels.triton_ops.split_k import MAX_PARTIALS

A100, SMALL = Card(80, 108), Card(86, 82)
LLAMA_2_7B = {(4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096)}
SIZES = [*LLAMA_2_7B, (1024, 4096), (2048, 1024), (3584, 37888), (8192, 57344), (28672, 8192)]


# --- beside what was measured -----------------------------------------------------------------------------------------


def ratios() -> dict[tuple[int, int], list[tuple[float, Place]]]:
    """By bits and rows: what the choice takes of the fastest way."""
    found: dict[tuple[int, int], list[tuple[float, Place]]] = defaultdict(list)
    for place in read(KEPT):
        found[place.bits, place.rows].append((place.chosen_us / place.best_us, place))
    return found


def test_all_choices_were_tried() -> None:
    places = read(KEPT)
    assert len(places) > 200
    assert [place for place in places if place.chosen_us is None] == []


def test_choices_are_close_to_the_fastest_that_was_measured() -> None:
    found = ratios()
    assert statistics.fmean(ratio for places in found.values() for ratio, _ in places) < 1.015
    for key, places in found.items():
        assert statistics.fmean(ratio for ratio, _ in places) < 1.03, key
        ratio, worst = max(places, key=lambda item: item[0])
        assert ratio < 1.18, worst


def test_4_bits_are_nowhere_slower_than_16_up_to_64_rows_of_llama_2_7b() -> None:
    places = [
        place for place in read(KEPT) if place.bits == 4 and place.rows <= 64 and (place.in_features, place.out_features) in LLAMA_2_7B
    ]
    assert {place.rows for place in places} == {8, 16, 32, 64}
    for place in places:
        assert place.chosen_us <= place.plain_us, place


def test_a_fit_changes_times_alone_and_only_for_better_choices() -> None:
    places = [place for place in read(KEPT) if (place.bits, place.rows) == (8, 32)]
    spoiled = [replace(tile, alone_us=10 * tile.alone_us) if index == 0 else tile for index, tile in enumerate(LARGE_TILES[8][2])]
    fitted, found = fit(spoiled, places, 300, "test")
    assert found == score(fitted, places)
    assert found.total < score(spoiled, places).total - 0.1
    assert [(tile.config, tile.programs_at_once) for tile in fitted] == [(tile.config, tile.programs_at_once) for tile in spoiled]


def test_a_fit_prints_what_the_settings_have() -> None:
    names = {"_FEW": FewRowsConfig, "_MANY": ManyRowsConfig, "Tile": Tile, "torch": torch}
    for buckets in LARGE_TILES.values():
        for tile in (tile for tiles in buckets for tile in tiles):
            assert eval(code_of(tile), names) == tile  # noqa: S307 - our own text


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("card", [H200, A100, SMALL], ids=str)
def test_few_rows_and_many_have_kernels_of_their_own(card: Card, bits: int) -> None:
    for sizes in SIZES:
        chosen = [choose_packed_config(rows, matrix(*sizes, bits), torch.float16, card) for rows in (1, 8, 17, 256)]
        assert [type(config) for config in chosen] == [FewRowsConfig, FewRowsConfig, ManyRowsConfig, ManyRowsConfig]


@pytest.mark.parametrize("card", [H200, SMALL], ids=str)
def test_rows_of_a_bucket_are_multiplied_alike(card: Card) -> None:
    for fewest, most in zip((1, *(rows + 1 for rows in ROW_BUCKETS)), ROW_BUCKETS, strict=False):
        for sizes in SIZES:
            assert len({choose_packed_config(rows, matrix(*sizes), torch.float16, card) for rows in range(fewest, most + 1)}) == 1


def test_a_tile_for_one_type_is_taken_for_that_type_alone() -> None:
    chosen = {dtype: choose_packed_config(16, matrix(4096, 12288), dtype, H200) for dtype in (torch.float16, torch.bfloat16)}
    assert [config.max_registers for config in chosen.values()] == [200, 168]


def test_tiles_hold_the_rows_they_are_for() -> None:
    for buckets in (*LARGE_TILES.values(), _SMALL_TILES):
        for most_rows, tiles in zip(ROW_BUCKETS, buckets, strict=False):
            for tile in tiles:
                if isinstance(tile.config, FewRowsConfig):
                    assert most_rows <= 2 * tile.config.block_m
                elif most_rows <= 64:
                    assert tile.config.block_m == most_rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("card", [H200, A100, SMALL], ids=str)
def test_parts_of_splits_have_space_and_blocks(card: Card, dtype: torch.dtype) -> None:
    for bits in LARGE_TILES:
        for in_features, out_features in (*SIZES, (512, 64), (256, 64)):
            for rows in ROW_BUCKETS:
                packed = matrix(in_features, out_features, bits)
                splits = choose_packed_config(rows, packed, dtype, card).splits
                assert splits <= packed.num_blocks
                assert splits == 1 or splits * rows * out_features <= MAX_PARTIALS


def test_a_product_takes_as_long_as_its_rounds() -> None:
    tile = Tile(FewRowsConfig(64, 2), programs_at_once=2, alone_us=1.0, shared_us=0.75, other_us=3.0, split_us=2.0)
    card = Card(90, 10)

    def us(num_tiles: int, splits: int = 1) -> float:
        return product_us(tile, splits, ProductSize(8, 64 * num_tiles, 4, 256), card)

    assert us(1) == us(10) == 4 * 1.0 + 3
    assert us(11) == us(20) == 4 * 1.5 + 3, "two share a multiprocessor"
    assert us(21) == us(20) + us(1)
    assert us(10, splits=2) == 2 * 1.5 + 3 + 2
    assert us(5, splits=3) == 2 * 1.5 + 3 + 2, "the longest part of 4 blocks has 2"


def test_very_many_rows_are_multiplied_with_a_plain_copy() -> None:
    assert multiplies_packed(256)
    assert not multiplies_packed(257)
    with pytest.raises(ValueError, match="multiplied with packed weights, not 257"):
        choose_packed_config(257, matrix(4096, 4096), torch.float16, H200)
