"""Attention over parts of a context: where each program leaves its part, and the kernel that merges them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.attention_common import card_of, places_of
from pagedcore_kernels.triton_ops.attention_settings import SHARE_UNIT, decode_workspace_size, merged_slice

MERGE_WARPS = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """[S, H, parts, D] values and [S, H, parts] log-sums (base 2), float32: first those of a shared prefix, then the splits'."""

    values: Tensor
    log_sums: Tensor
    num_prefix_parts: int
    num_splits: int

    @property
    def num_parts(self) -> int:
        return self.num_prefix_parts + self.num_splits

    @classmethod
    def within(cls, query: Tensor, num_splits: int, workspace: Tensor | None, num_prefix_parts: int = 0) -> Parts:
        """Views of the workspace; the query stands in where there is one part only. Raises ValueError if the workspace is too small."""
        num_sequences, num_heads, head_dim = query.shape
        num_parts = num_prefix_parts + num_splits
        size = decode_workspace_size(num_sequences, num_heads, head_dim, num_parts)
        if size == 0:
            return cls(query, query, num_prefix_parts, num_splits)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=query.device)
        if workspace.dtype != torch.float32 or workspace.numel() < size:
            raise ValueError(f"workspace is {workspace.numel()} elements of {workspace.dtype}; {num_parts} parts need {size} of float32.")
        flat = workspace.view(-1)
        num_values = num_sequences * num_heads * num_parts * head_dim
        return cls(flat[:num_values], flat[num_values:size], num_prefix_parts, num_splits)


def merge_parts(parts: Parts, seq_lens: Tensor, window: int, prefix_lens: Tensor | None, result: Tensor, out_places: Tensor | None) -> None:
    """Changes `result`; `seq_lens`, `window` and `prefix_lens` say, as they did before, which of the parts had work."""
    num_sequences, num_heads, head_dim = result.shape
    uses_pdl = card_of(result.device).has_dependent_launch
    slice_dim = merged_slice(num_sequences, head_dim)
    _merge_parts[(num_sequences * num_heads, triton.cdiv(head_dim, slice_dim))](
        parts.values,
        parts.log_sums,
        seq_lens,
        seq_lens if prefix_lens is None else prefix_lens,
        result,
        seq_lens if out_places is None else out_places,
        *result.stride()[:2],
        num_heads,
        parts.num_prefix_parts,
        parts.num_splits,
        window,
        HEAD_DIM=head_dim,
        SLICE_DIM=slice_dim,
        PARTS_PAD=triton.next_power_of_2(parts.num_parts),
        SHARE_UNIT=SHARE_UNIT,
        HAS_PREFIX=prefix_lens is not None,
        HAS_PLACES=out_places is not None,
        USE_PDL=uses_pdl,
        num_warps=MERGE_WARPS,
        **({"launch_pdl": True} if uses_pdl else {}),
    )


@triton.jit
def share_of_keys(num_keys, num_splits, UNIT: tl.constexpr):
    """Keys of each split but the last; see `attention_settings.share_of_split`."""
    return tl.cdiv(tl.cdiv(num_keys, num_splits), UNIT) * UNIT


@triton.jit(
    do_not_specialize=["num_heads", "num_prefix_parts", "num_splits", "window"],
    do_not_specialize_on_alignment=["log_sum_ptr", "seq_lens_ptr", "prefix_lens_ptr", "places_ptr"],
)
def _merge_parts(
    value_ptr,
    log_sum_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
    out_ptr,
    places_ptr,
    out_stride_s,
    out_stride_h,
    num_heads,
    num_prefix_parts,
    num_splits,
    window,
    HEAD_DIM: tl.constexpr,
    SLICE_DIM: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    SHARE_UNIT: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """sum_i 2^l_i v_i / sum_i 2^l_i over the parts of one query head that had work; zeros where none had."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // num_heads
    dims = tl.program_id(1) * SLICE_DIM + tl.arange(0, SLICE_DIM)
    parts = tl.arange(0, PARTS_PAD)
    num_keys = tl.load(seq_lens_ptr + sequence)
    prefix_len = 0
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_lens_ptr + sequence)
    num_seen = tl.minimum(num_keys - prefix_len, window)
    splits = parts - num_prefix_parts
    has_work = (splits >= 0) & (splits < num_splits) & (splits * share_of_keys(num_seen, num_splits, SHARE_UNIT) < num_seen)
    if HAS_PREFIX:
        prefix_share = share_of_keys(prefix_len, num_prefix_parts, SHARE_UNIT)
        has_work = has_work | ((splits < 0) & (parts * prefix_share < prefix_len))
    is_dim = dims < HEAD_DIM
    places = places_of(places_ptr, (row % num_heads) * out_stride_h + dims, is_dim, HAS_PLACES)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    slots = row * (num_prefix_parts + num_splits) + parts
    log_sums = tl.load(log_sum_ptr + slots, mask=has_work, other=-1e30)
    # Asked for with the log-sums: no load passes the barriers of a sum.
    mask = has_work[:, None] & is_dim[None, :]
    values = tl.load(value_ptr + slots[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    weights = tl.exp2(log_sums - tl.max(log_sums, 0))
    weights = weights / tl.sum(weights, 0)
    merged = tl.sum(values * weights[:, None], 0)
    tl.store(out_ptr + sequence * out_stride_s + places, merged.to(out_ptr.dtype.element_ty), mask=is_dim)
