"""What the split-K products share: a workspace, the ordered sum of the parts, and the early request of weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import INTERPRETED

MAX_PARTIALS = 4 << 20
MAX_TILES = 16 << 10


@dataclass(frozen=True, slots=True)
class SplitKWorkspace:
    """Owns the parts of split sums and the counters of finished programs, which are zero whenever no product runs.

    Products that use one workspace must follow each other on one stream, or in one captured graph.
    """

    partials: Tensor  # [MAX_PARTIALS] float32
    counters: Tensor  # [MAX_TILES] int32

    @classmethod
    def allocate(cls, device: torch.device) -> SplitKWorkspace:
        """A new workspace. Raises RuntimeError while a graph is captured: its counters would be zeroed at replay only."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("there is no split-K workspace yet: call split_k_workspace(device) before a graph is captured")
        partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
        return cls(partials, torch.zeros(MAX_TILES, dtype=torch.int32, device=device))

    def fitting(self, splits: int, num_rows: int, out_features: int, block_n: int, *, row_tiles: int = 1) -> int:
        """`splits`, or as many as there is space for."""
        if triton.cdiv(out_features, block_n) * row_tiles > self.counters.numel():
            return 1
        return max(1, min(splits, self.partials.numel() // (num_rows * out_features)))


@functools.cache
def split_k_workspace(device: torch.device) -> SplitKWorkspace:
    """The workspace that the products on `device` use where none is given; allocated by the first call."""
    return SplitKWorkspace.allocate(device)


def launch_options(num_warps: int, *, pdl: bool, max_registers: int | None = None) -> dict[str, object]:
    """Options of a kernel launch that the interpreter does not know."""
    return {} if INTERPRETED else {"num_warps": num_warps, "launch_pdl": pdl, "maxnreg": max_registers}


@triton.jit
def prefetch_to_l2(pointers) -> None:
    """Ask for the 128 bytes around each pointer to be brought into the L2 cache; waits for nothing."""
    addresses = pointers.to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _store(total, bias, offsets, mask, out_ptr) -> None:
    tl.store(out_ptr + offsets, (total + bias).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_sum_of_splits(
    part,
    bias,
    offsets,
    mask,
    out_ptr,
    partials_ptr,
    counters_ptr,
    tile,
    split,
    partial_stride,
    SPLITS: tl.constexpr,
) -> None:
    """Store this program's part; the last program of a tile adds the parts in the order of the splits and stores the result.

    `partial_stride` is the number of values of one split. Leaves the tile's counter at zero.
    """
    if SPLITS == 1:
        _store(part, bias, offsets, mask, out_ptr)
    else:
        tl.store(partials_ptr + split * partial_stride + offsets, part, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros_like(part)
            # All parts of a small tile are asked for at once; those of a large one would not fit into the registers.
            UNROLL: tl.constexpr = SPLITS if part.numel <= 4096 and part.numel * SPLITS <= 16384 else 1
            for index in tl.range(SPLITS, loop_unroll_factor=UNROLL):
                # .cg: the parts were written by other multiprocessors, whose writes the L1 cache does not see.
                total += tl.load(partials_ptr + index * partial_stride + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            _store(total, bias, offsets, mask, out_ptr)
            tl.store(counters_ptr + tile, 0)
