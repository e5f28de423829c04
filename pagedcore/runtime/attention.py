"""Attention of one pass over the paged cache, and the one place that chooses its back-end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedcore.batch import Attention, AttentionSpec, Rotation
from pagedcore.errors import ConfigError
from pagedcore.runtime.decode_groups import DecodeGroup, build_decode_groups
from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.kv_cache import KVCache
from pagedcore.runtime.triton_attention import TritonAttention
from pagedcore_kernels import has_triton, indexable, rotate_qkv, take_columns, to_cache, write_kv

MAX_MASKED_QUERIES = 256
"""Queries of one masked call: bounds the mask to this many rows."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A segment of more than one token: its tokens are [first, last) of the pass."""

    first: int
    last: int
    seq_len: int
    block_table: Tensor  # [max_blocks] int32

    @property
    def num_queries(self) -> int:
        return self.last - self.first

    @property
    def start(self) -> int:
        """Position of the first query; the cache holds what comes before it."""
        return self.seq_len - self.num_queries


class PagedAttention:
    """Attention of one pass in torch. Owns what all layers share: which rows attend together, masks, gather indices.

    Single tokens attend in groups of rows of similar length: one gather of their blocks into the workspace, one fused
    call. Longer segments attend one by one. `workspace` [slots, 2 K, D] holds gathered blocks. Slots behind a
    row's last token are read and masked: they must be finite, which `KVCache.open_blocks` sees to.
    """

    def __init__(self, inputs: PassInputs, cache: KVCache, workspace: Tensor | None) -> None:
        assert workspace is not None, "gathered blocks need room"
        self._inputs = inputs
        self._cache = cache
        self._workspace = workspace
        self._prefills: list[_Prefill] = []
        self._decode_segments: list[int] = []
        self._decode_groups: dict[int | None, list[DecodeGroup]] = {}
        self._split_segments()

    gathers_angles = True

    def attend(self, qkv: Tensor, rotation: Rotation, spec: AttentionSpec) -> Tensor:
        """See `pagedcore.batch.Attention`. Changes the layer's cache and the workspace."""
        assert rotation.cos is not None, "this back-end reads gathered angles"
        assert rotation.sin is not None, "this back-end reads gathered angles"
        norms = {"query_norm": rotation.query_norm, "key_norm": rotation.key_norm}
        query, key, value = rotate_qkv(qkv, rotation.cos, rotation.sin, num_heads=spec.num_heads, **norms, eps=rotation.eps)
        out = self.forward(spec.layer, query, key, value, scale=spec.scale, sliding_window=spec.sliding_window).flatten(1)
        return out if spec.out_order is None else take_columns(out, spec.out_order.taken)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None = None) -> Tensor:
        """Write keys and values [T, K, D] of rotated heads, then attend with `query` [T, H, D] to what the cache holds of them."""
        cache_dtype = self._cache.data.dtype
        key, value = to_cache(key, cache_dtype), to_cache(value, cache_dtype)
        write_kv(key, value, self._cache.keys(layer), self._cache.values(layer), self._inputs.slot_mapping)
        key, value = key.to(query.dtype), value.to(query.dtype)
        groups = self._groups(sliding_window, query)
        if not self._prefills and len(groups) == 1 and groups[0].token_indices is None:
            return self._decode(groups[0], layer, query, scale)
        out = torch.empty_like(query)
        for group in groups:
            if group.token_indices is None:
                out[: group.num_rows] = self._decode(group, layer, query[: group.num_rows], scale)
            else:
                rows = query.index_select(0, group.token_indices)
                out.index_copy_(0, group.token_indices, self._decode(group, layer, rows, scale))
        for prefill in self._prefills:
            self._prefill(prefill, layer, query, key, value, out, scale, sliding_window)
        return out

    def _split_segments(self) -> None:
        locations = self._inputs.query_start_loc
        for segment, seq_len in enumerate(self._inputs.seq_lens):
            first, last = locations[segment], locations[segment + 1]
            if last - first == 1:
                self._decode_segments.append(segment)
            else:
                self._prefills.append(_Prefill(first, last, seq_len, self._inputs.block_tables[segment]))

    def _groups(self, sliding_window: int | None, query: Tensor) -> list[DecodeGroup]:
        """Built once a pass for each window that the model uses."""
        if sliding_window not in self._decode_groups:
            self._decode_groups[sliding_window] = build_decode_groups(
                self._inputs,
                self._decode_segments,
                block_size=self._cache.block_size,
                capacity_slots=self._workspace.shape[0],
                sliding_window=sliding_window,
                dtype=query.dtype,
            )
        return self._decode_groups[sliding_window]

    def _decode(self, group: DecodeGroup, layer: int, query: Tensor, scale: float) -> Tensor:
        """[R, H, D] -> [R, H, D]. The queries of one kv head are treated as successive queries, so keys are read once."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = self._cache.layout.num_kv_heads
        gathered = self._gather(layer, group.block_ids)
        gathered = gathered.view(num_rows, -1, 2 * num_kv_heads, head_dim).transpose(1, 2)  # [R, 2 K, L, D]
        attended = scaled_dot_product_attention(
            query.view(num_rows, num_kv_heads, -1, head_dim),
            gathered[:, :num_kv_heads],
            gathered[:, num_kv_heads:],
            attn_mask=group.mask.expand(-1, -1, num_heads // num_kv_heads, -1),
            scale=scale,
        )
        return attended.reshape(num_rows, num_heads, head_dim)

    def _gather(self, layer: int, block_ids: Tensor) -> Tensor:
        """The slots of these blocks, [len(block_ids) * block_size, 2 K, D]: the head of the workspace."""
        blocks = self._cache.flat_blocks(layer)
        num_slots = block_ids.shape[0] * self._cache.block_size
        gathered = self._workspace[:num_slots]
        flat = gathered.view(block_ids.shape[0], -1)
        if blocks.dtype == flat.dtype:
            torch.index_select(blocks, 0, block_ids, out=flat)
        else:
            flat.copy_(indexable(blocks).index_select(0, block_ids).view(blocks.dtype))
        return gathered

    def _prefill(
        self,
        prefill: _Prefill,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        tokens = slice(prefill.first, prefill.last)
        if prefill.start == 0:
            keys, values = key[tokens], value[tokens]
        else:
            keys, values = self._context(prefill, layer)
        if prefill.start == 0 and (sliding_window is None or prefill.seq_len <= sliding_window):
            out[tokens] = _attend_causally(query[tokens], keys, values, scale)
            return
        for first in range(0, prefill.num_queries, MAX_MASKED_QUERIES):
            last = min(first + MAX_MASKED_QUERIES, prefill.num_queries)
            seen = _seen_by(prefill.start + first, prefill.start + last, sliding_window)
            mask = _mask(prefill.start + first, prefill.start + last, seen, sliding_window, query.device)
            queries = slice(prefill.first + first, prefill.first + last)
            out[queries] = _attend_masked(query[queries], keys[seen], values[seen], scale, mask)

    def _context(self, prefill: _Prefill, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of the sequence, each [L, K, D]."""
        num_blocks = -(-prefill.seq_len // self._cache.block_size)
        gathered = self._gather(layer, prefill.block_table[:num_blocks])[: prefill.seq_len]
        num_kv_heads = self._cache.layout.num_kv_heads
        return gathered[:, :num_kv_heads], gathered[:, num_kv_heads:]


def _seen_by(first_position: int, end_position: int, sliding_window: int | None) -> slice:
    """Positions that any query in [first_position, end_position) may see."""
    return slice(0 if sliding_window is None else max(0, first_position - sliding_window + 1), end_position)


def _mask(first_position: int, end_position: int, seen: slice, sliding_window: int | None, device: torch.device) -> Tensor:
    """[Q, L], True where the query may look."""
    queries = torch.arange(first_position, end_position, device=device)[:, None]
    keys = torch.arange(seen.start, seen.stop, device=device)[None, :]
    visible = keys <= queries
    return visible if sliding_window is None else visible & (keys > queries - sliding_window)


def _attend_causally(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[Q, H, D] over [Q, K, D]: kv heads take the place of the batch, so that grouped heads share keys without a copy."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    attended = scaled_dot_product_attention(
        query.view(num_queries, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
        values.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
        is_causal=True,
        scale=scale,
    )  # [K, G, Q, D]
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def _attend_masked(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Tensor:
    """[Q, H, D] over [L, K, D] with `mask` [Q, L]. The heads of a group are successive queries of their kv head: keys are read
    once a group, and have no stride of 0, with which, under a mask, torch 2.11's fp32 CUDA kernel gets the last query wrong.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_queries, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    attended = scaled_dot_product_attention(
        grouped.reshape(1, num_kv_heads, group_size * num_queries, head_dim),
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask.repeat(group_size, 1),
        scale=scale,
    )  # [1, K, G Q, D]
    return attended.reshape(num_kv_heads, group_size, num_queries, head_dim).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


AttentionFactory = Callable[[PassInputs, KVCache, Tensor | None], Attention]

ATTENTION_BACKENDS: dict[str, AttentionFactory] = {"torch": PagedAttention, "triton": TritonAttention.of_pass}


def select_attention_backend(device: torch.device, name: str = "auto") -> str:
    """The back-end for `device`, or `name` if it exists. Raises `ConfigError` for a name that does not."""
    if name == "auto":
        return "triton" if device.type == "cuda" and has_triton() else "torch"
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(f"attention_backend is {name!r} and must be auto or one of {', '.join(ATTENTION_BACKENDS)}.")
    return name
