"""Products of 1 to 64 rows with a plain matrix, bound by the bandwidth at which the matrix is read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, LinearConfig, RowConfig, choose_config
from pagedcore_kernels.triton_ops.row_linear import check_operands, check_product_size, make_product, row_linear
from pagedcore_kernels.triton_ops.split_k import (
    SplitKWorkspace,
    launch_options,
    prefetch_to_l2,
    split_k_workspace,
    store_sum_of_splits,
)

MAX_ROWS = 64


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: LinearConfig | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32: [M, K], [N, K], [N] -> [M, N], with M from 1 to 64; `out` if it is given.

    The same configuration gives the same bits. May be captured in a graph once it ran outside of one on that device.
    Raises ValueError for tensors that the kernels do not read.
    """
    num_rows, in_features = x.shape[0], x.shape[-1]
    check_operands(x, weight, bias, max_rows=MAX_ROWS)
    card = card_of(x.device)
    chosen = config or choose_config(num_rows, weight.shape[0], in_features, capability=card.capability, itemsize=x.element_size())
    if isinstance(chosen, RowConfig):
        return row_linear(x, weight, bias, config=chosen, workspace=workspace, out=out)
    check_product_size(num_rows, weight.shape[0])
    result = make_product(x, weight.shape[0], out)
    _launch(chosen, x, weight, bias, result, workspace or split_k_workspace(x.device), card.has_dependent_launch)
    return result


def _launch(config: DotConfig, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, workspace: SplitKWorkspace, pdl: bool) -> None:
    out_features, in_features = weight.shape
    num_rows = x.shape[0]
    splits = workspace.fitting(config.splits, num_rows, out_features, config.block_n)
    _dot_kernel[(triton.cdiv(out_features, config.block_n), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        workspace.partials,
        workspace.counters,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLITS=splits,
        EVEN_K=in_features % config.block_k == 0,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        PREFETCHED=config.prefetched_steps if pdl else 0,
        NUM_STAGES=config.num_stages,
        **launch_options(config.num_warps, pdl=pdl),
    )


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    x_stride_0,
    weight_stride_0,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCHED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """out[m, n] = sum over k of weight[n, k] x[m, k] + bias[n]; reference: reference/linear.py.

    The weights are the left operand, so that the tile's long side lies along the instruction's 64 or 16 rows.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    per_split = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    # Rows past N read the last one again: their sums are not stored.
    weight_rows = weight_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * weight_stride_0
    x_rows = x_ptr + rows.to(tl.int64)[None, :] * x_stride_0
    if PREFETCHED > 0:
        ITEMS_A_LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        lines = tl.arange(0, max(1, BLOCK_K // ITEMS_A_LINE)) * ITEMS_A_LINE
        for ahead in tl.static_range(PREFETCHED):
            prefetch_to_l2(weight_rows + tl.minimum(first + ahead * BLOCK_K + lines, K - 1)[None, :])
    bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None] if HAS_BIAS else 0.0
    if PDL:
        if PREFETCHED > 0:
            gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=NUM_STAGES):
        columns = start + steps
        if EVEN_K:
            weights = tl.load(weight_rows + columns[None, :])
            x = tl.load(x_rows + columns[:, None], mask=rows[None, :] < M, other=0.0)
        else:
            weights = tl.load(weight_rows + columns[None, :], mask=columns[None, :] < last, other=0.0)
            x = tl.load(x_rows + columns[:, None], mask=(rows[None, :] < M) & (columns[:, None] < last), other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
    if PDL and PREFETCHED == 0:
        gdc_launch_dependents()
    offsets = rows[None, :] * N + outputs[:, None]
    mask = (rows[None, :] < M) & (outputs[:, None] < N)
    store_sum_of_splits(sums, bias, offsets, mask, out_ptr, partials_ptr, counters_ptr, tile, split, M * N, SPLITS)
