"""Attention through Triton kernels: rotation and KV write in one launch, then one or two launches over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagedcore.batch import Rotation
from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequences:
    """S sequences whose queries are the last tokens of each, on the device; the two maxima are the host's."""

    slot_mapping: Tensor  # [T] int64
    block_tables: Tensor  # [S, max_blocks] int32
    seq_lens: Tensor  # [S] int32
    query_start_loc: Tensor | None  # [S + 1] int32; None: one query a sequence
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of_pass(cls, inputs: PassInputs) -> PagedSequences:
        longest = max(last - first for first, last in zip(inputs.query_start_loc, inputs.query_start_loc[1:], strict=False))
        return cls(
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            seq_lens=inputs.device_seq_lens,
            query_start_loc=inputs.device_query_start_loc if longest > 1 else None,
            max_query_len=longest,
            max_seq_len=max(inputs.seq_lens),
        )


class TritonAttention:
    """Attention of one step. Reads nothing behind a sequence's last token, so what a block held before does not matter."""

    gathers_angles = False

    def __init__(self, sequences: PagedSequences, cache: KVCache) -> None:
        self._sequences = sequences
        self._cache = cache

    @classmethod
    def of_pass(cls, inputs: PassInputs, cache: KVCache, workspace: Tensor | None) -> TritonAttention:
        return cls(PagedSequences.of_pass(inputs), cache)

    def attend(self, layer: int, qkv: Tensor, rotation: Rotation, *, num_heads: int, scale: float, sliding_window: int | None) -> Tensor:
        """See `pagedcore.batch.Attention`. Changes the cache of `layer`."""
        from pagedcore_kernels.triton_ops.attention_decode import paged_attention_decode
        from pagedcore_kernels.triton_ops.attention_prefill import paged_attention_prefill
        from pagedcore_kernels.triton_ops.rotary_kv import rotate_and_write_kv

        sequences = self._sequences
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        query = rotate_and_write_kv(
            qkv,
            rotation.cos_sin,
            rotation.positions,
            sequences.slot_mapping,
            keys,
            values,
            num_heads=num_heads,
            query_norm=rotation.query_norm,
            key_norm=rotation.key_norm,
            eps=rotation.eps,
        )
        if sequences.query_start_loc is None:
            return paged_attention_decode(
                query,
                keys,
                values,
                sequences.block_tables,
                sequences.seq_lens,
                scale=scale,
                max_seq_len=sequences.max_seq_len,
                sliding_window=sliding_window,
            )
        return paged_attention_prefill(
            query,
            keys,
            values,
            sequences.block_tables,
            sequences.seq_lens,
            sequences.query_start_loc,
            scale=scale,
            max_query_len=sequences.max_query_len,
            sliding_window=sliding_window,
        )
