"""Attention through Triton kernels: rotation and KV write in one launch, then one or two launches over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pagedcore.batch import AttentionSpec, ElementOrder, Rotation
from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.kv_cache import KVCache
from pagedcore_kernels import take_columns

LONG_QUERIES = 4096
"""Queries of one sequence from which cuDNN's kernel over gathered keys is faster than ours over the paged cache."""
_CUDNN_HEAD_DIMS = (64, 128)
_CUDNN_CAPABILITY = 90
"""Where it was measured. Some older cards have no such kernel, and the call would fail."""


def takes_cudnn(*, capability: int, head_dim: int, element_bytes: int, sliding_window: int | None) -> bool:
    """Whether long sequences go to cuDNN: 16-bit heads on Hopper that see all keys."""
    return capability == _CUDNN_CAPABILITY and head_dim in _CUDNN_HEAD_DIMS and element_bytes == 2 and sliding_window is None


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """What sequences of one query have in common, on the device, where it may change."""

    table: Tensor  # [max_blocks] int32
    lens: Tensor  # [S] int32, keys that a sequence begins with; 0 for one that begins otherwise, and for padding
    max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequences:
    """S sequences whose queries are the last tokens of each, on the device."""

    slot_mapping: Tensor  # [T] int64
    block_tables: Tensor  # [S, max_blocks] int32
    seq_lens: Tensor  # [S] int32
    max_seq_len: int
    prefill: Prefill | None
    """None: one query a sequence."""
    prefix: PrefixKeys | None = None

    @property
    def num_decodes(self) -> int:
        return len(self.seq_lens) if self.prefill is None else self.prefill.num_decodes

    @property
    def num_stored_in_order(self) -> int:
        """Tokens that the decode kernel stores in the order that is asked for: where few sequences are decoded, one each."""
        from pagedcore_kernels.triton_ops.attention_settings import MAX_STORED_IN_ORDER

        has_others_among_them = self.prefill is not None and self.prefill.decode_lens is not None
        return 0 if has_others_among_them or self.num_decodes > MAX_STORED_IN_ORDER else self.num_decodes

    @property
    def decode_lens(self) -> Tensor:
        """Of the sequences with one query, which come first; 0 for others among them."""
        lens = None if self.prefill is None else self.prefill.decode_lens
        return self.seq_lens if lens is None else lens

    @classmethod
    def of_pass(cls, inputs: PassInputs) -> PagedSequences:
        return cls(
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            seq_lens=inputs.device_seq_lens,
            max_seq_len=max(inputs.seq_lens),
            prefill=Prefill.of_pass(inputs),
        )


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Sequences [first, end) that one launch serves."""

    first: int
    end: int
    max_query_len: int
    long: tuple[slice, int] | None = None
    """One long sequence alone: its tokens of the pass, and its length."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The sequences behind the first `num_decodes`, which have one query each."""

    query_start_loc: Tensor  # [S + 1] int32
    num_decodes: int
    runs: list[PrefillRun]
    decode_lens: Tensor | None = None
    """[num_decodes] int32, in a graph: only the host knows how many there are, so others are among them, with length 0."""

    @classmethod
    def of_pass(cls, inputs: PassInputs) -> Prefill | None:
        counts = [last - first for first, last in pairwise(inputs.query_start_loc)]
        if inputs.num_decodes == len(counts):
            return None
        return cls(inputs.device_query_start_loc, inputs.num_decodes, list(_runs(inputs, counts, inputs.num_decodes)))


def _runs(inputs: PassInputs, counts: list[int], first: int) -> Iterator[PrefillRun]:
    """A long sequence alone, the others between them together."""
    for sequence in range(first, len(counts)):
        count, seq_len = counts[sequence], inputs.seq_lens[sequence]
        if count >= LONG_QUERIES:
            if first < sequence:
                yield PrefillRun(first, sequence, max(counts[first:sequence]))
            start = inputs.query_start_loc[sequence]
            yield PrefillRun(sequence, sequence + 1, count, (slice(start, start + count), seq_len))
            first = sequence + 1
    if first < len(counts):
        yield PrefillRun(first, len(counts), max(counts[first:]))


class TritonAttention:
    """Attention of one step. Reads nothing behind a sequence's last token, so what a block held before does not matter."""

    gathers_angles = False

    def __init__(self, sequences: PagedSequences, cache: KVCache) -> None:
        self._sequences = sequences
        self._cache = cache

    @classmethod
    def of_pass(cls, inputs: PassInputs, cache: KVCache, workspace: Tensor | None) -> TritonAttention:
        return cls(PagedSequences.of_pass(inputs), cache)

    def attend(self, qkv: Tensor, rotation: Rotation, spec: AttentionSpec) -> Tensor:
        """See `pagedcore.batch.Attention`. Changes the layer's cache."""
        from pagedcore_kernels.triton_ops.rotary_kv import rotate_and_write_kv

        sequences = self._sequences
        keys, values = self._cache.keys(spec.layer), self._cache.values(spec.layer)
        query = rotate_and_write_kv(
            qkv,
            rotation.cos_sin,
            rotation.positions,
            sequences.slot_mapping,
            keys,
            values,
            num_heads=spec.num_heads,
            query_norm=rotation.query_norm,
            key_norm=rotation.key_norm,
            eps=rotation.eps,
        )
        out = torch.empty_like(query)
        num_decodes, order = sequences.num_decodes, spec.out_order
        num_ordered = 0 if order is None else sequences.num_stored_in_order
        places = order.places if order is not None and num_ordered else None
        if num_decodes:
            self._decode(query[:num_decodes], keys, values, out[:num_decodes], spec, places)
        if sequences.prefill is not None:
            self._prefill(sequences.prefill, query, keys, values, out, spec)
        return out.flatten(1) if order is None or num_ordered == len(out) else _in_order(out.flatten(1), num_ordered, order)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, spec: AttentionSpec, places: Tensor | None) -> None:
        """A layer with a window reads what a prefix has in its window with the rest."""
        from pagedcore_kernels.triton_ops.attention_decode import paged_attention_decode
        from pagedcore_kernels.triton_ops.attention_shared_prefix import paged_attention_decode_shared

        sequences = self._sequences
        prefix, window = sequences.prefix, spec.sliding_window
        paged = (sequences.block_tables[: len(query)], sequences.decode_lens[: len(query)])
        if prefix is None or window is not None:
            attend = partial(paged_attention_decode, query, keys, values, *paged, sliding_window=window)
        else:
            shared = (query, keys, values, prefix.table, prefix.lens, *paged)
            attend = partial(paged_attention_decode_shared, *shared, max_prefix_len=prefix.max_len)
        attend(scale=spec.scale, max_seq_len=sequences.max_seq_len, out=out, out_places=places)

    def _prefill(self, prefill: Prefill, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, spec: AttentionSpec) -> None:
        from pagedcore_kernels.triton_ops.attention_common import card_of
        from pagedcore_kernels.triton_ops.attention_prefill import paged_attention_prefill
        from pagedcore_kernels.triton_ops.attention_prefill_cudnn import paged_attention_prefill_cudnn

        sequences = self._sequences
        takes_long = takes_cudnn(
            capability=card_of(query.device).capability,
            head_dim=query.shape[2],
            element_bytes=query.element_size(),
            sliding_window=spec.sliding_window,
        )
        for run in prefill.runs:
            if run.long is not None and takes_long:
                tokens, seq_len = run.long
                table = sequences.block_tables[run.first]
                paged_attention_prefill_cudnn(query[tokens], keys, values, table, seq_len=seq_len, scale=spec.scale, out=out[tokens])
                continue
            paged_attention_prefill(
                query,
                keys,
                values,
                sequences.block_tables[run.first : run.end],
                sequences.seq_lens[run.first : run.end],
                prefill.query_start_loc[run.first : run.end + 1],
                scale=spec.scale,
                max_query_len=run.max_query_len,
                sliding_window=spec.sliding_window,
                out=out,
            )


def _in_order(out: Tensor, num_ordered: int, order: ElementOrder) -> Tensor:
    """[T, H * D] in order, as its first `num_ordered` rows are already."""
    result = torch.empty_like(out)
    result[:num_ordered] = out[:num_ordered]
    take_columns(out[num_ordered:], order.taken, out=result[num_ordered:])
    return result
