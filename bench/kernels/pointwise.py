"""`python -m bench.kernels.pointwise [--json FILE] [--only OP] [--no-dependent-launch]`: everything between the products, on one GPU.

Replays of a CUDA graph over buffers that are rotated over up to 260 MB (at most 64 sets: what one token needs stays in the L2, as it
does in an engine), beside plain torch in the same process. Each result is compared with the reference first. The floor is bytes that
must be read and written / 4.3 TB/s (what a copy reaches on an H200). Sampling: logits of a standard deviation of 3, one setting a row.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor

from pagedcore_kernels import gumbel_noise, keep_candidates, order_candidates, rotary, write_kv
from pagedcore_kernels.reference import rms_norm as norm_reference
from pagedcore_kernels.reference.rotary_kv import rotate_and_write_kv as rotary_kv_reference
from pagedcore_kernels.reference.sample_tokens import sample_tokens as sample_tokens_reference
from pagedcore_kernels.reference.silu_mul import silu_mul as silu_reference
from pagedcore_kernels.reference.step_inputs import DecodeInputs
from pagedcore_kernels.reference.step_inputs import prepare_decode_inputs as prepare_reference
from pagedcore_kernels.reference.step_inputs import write_sampled as write_sampled_reference
from pagedcore_kernels.triton_ops import activation, norms, norms_in_order, rotary_kv, sampling, step_inputs
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.take_columns import take_columns

COPY_BYTES_PER_S = 4.3e12
ROTATED_BYTES = 260e6
MAX_SETS = 64
GRAPH_US = 600.0
MAX_CALLS = 600
TOKENS = (1, 32, 128, 2048)
ROWS = (1, 32, 128)
BLOCK_SIZE = 16
BF16 = torch.bfloat16
MAX_RELATIVE_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes of one model."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    has_qk_norm: bool


MODELS = (
    Model("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936, has_qk_norm=True),
    Model("Llama-2-7B", 4096, 32, 32, 128, 11008, 32000, has_qk_norm=False),
)
# temperature, top_k, top_p, min_p
DRAWS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_p 0.95": (1.0, 0, 0.95, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
}


@dataclass(frozen=True, slots=True)
class Work:
    """One op on one set of buffers. `ours` and `theirs` can be captured; both return what is compared."""

    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]
    check: Callable[[], Tensor]
    """What ours must return, by the reference."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table, before it is timed."""

    op: str
    model: str
    num_tokens: int
    make: Callable[[], Work]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    op: str
    model: str
    num_tokens: int
    us: float
    torch_us: float
    floor_us: float
    relative_error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line for each result to this file")
    parser.add_argument("--only", help="ops whose name begins so")
    parser.add_argument("--no-dependent-launch", action="store_true", help="let each kernel wait until the one before it has ended")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    with mock.patch.object(Card, "has_dependent_launch", Card.has_dependent_launch if not args.no_dependent_launch else False):
        results = [run(case) for case in cases() if case.op.startswith(args.only or "")]
    for line in results:
        ratio = f"torch {line.torch_us:8.1f} us ({line.torch_us / line.us:5.1f} x)"
        where = f"{line.op:34} {line.model:11} {line.num_tokens:5}"
        print(f"{where} {line.us:8.2f} us  floor {line.floor_us:7.2f} us  {ratio}  error {line.relative_error:.1e}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {time.monotonic() - started:.0f} s")
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "dependent_launch": not args.no_dependent_launch}
        with args.json.open("a") as file:
            file.writelines(json.dumps(about | asdict(line)) + "\n" for line in results)


def cases() -> Iterator[Case]:
    for model in MODELS:
        for num_tokens in TOKENS:
            yield Case("add_rms_norm", model.name, num_tokens, lambda m=model, t=num_tokens: add_rms_norm(m, t))
            yield Case("add_rms_norm_in_order", model.name, num_tokens, lambda m=model, t=num_tokens: add_rms_norm_in_order(m, t))
            yield Case("take_columns", model.name, num_tokens, lambda m=model, t=num_tokens: columns(m, t))
            yield Case("silu_mul", model.name, num_tokens, lambda m=model, t=num_tokens: silu_mul(m, t))
            yield Case("rotate_and_write_kv", model.name, num_tokens, lambda m=model, t=num_tokens: rotate_and_write_kv(m, t))
        for num_rows in ROWS:
            for name in DRAWS:
                yield Case(f"sample {name}", model.name, num_rows, lambda m=model, n=num_rows, d=name: draw(m, n, d))
    for num_rows in ROWS:
        yield Case("prepare_decode_inputs", "", num_rows, lambda n=num_rows: decode_inputs(n))
        yield Case("write_sampled", "", num_rows, lambda n=num_rows: write_sampled(n))


def run(case: Case) -> Result:
    first = case.make()
    expected = first.check()
    relative_error = _relative_error(first.ours(), expected)
    if not relative_error < (MAX_RELATIVE_ERROR if expected.is_floating_point() else 1.5 / len(expected)):
        raise SystemExit(f"{case.op}, {case.model}, {case.num_tokens}: error {relative_error}; nothing is timed that is wrong")
    num_sets = max(1, min(MAX_SETS, math.ceil(ROTATED_BYTES / first.num_bytes)))
    works = [first, *(case.make() for _ in range(num_sets - 1))]
    return Result(
        case.op,
        case.model,
        case.num_tokens,
        us=measure([work.ours for work in works]),
        torch_us=measure([work.theirs for work in works]),
        floor_us=first.num_bytes / COPY_BYTES_PER_S * 1e6,
        relative_error=relative_error,
    )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of token ids and other integers the share that differs: one may, where two tokens are as good as tied."""
    if not actual.is_floating_point():
        return float((actual != expected).float().mean())
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def measure(calls: list[Callable[[], Tensor]]) -> float:
    """Median microseconds a call, in replays of one graph of all calls, repeated until it takes long enough to be timed."""
    single = _time_graph(calls, 1)
    repeats = max(1, min(MAX_CALLS // len(calls), math.ceil(GRAPH_US / (single * len(calls)))))
    return _time_graph(calls, repeats) if repeats > 1 else single


def _time_graph(calls: list[Callable[[], Tensor]], repeats: int, num_replays: int = 7) -> float:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


# --- the ops ----------------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def add_rms_norm(model: Model, num_tokens: int) -> Work:
    x, residual, weight = randn(num_tokens, model.hidden), randn(num_tokens, model.hidden), randn(model.hidden)
    start = residual.clone()

    def check() -> Tensor:
        return norm_reference.add_rms_norm(x, start.clone(), weight, eps=1e-6)

    return Work(
        ours=lambda: norms.add_rms_norm(x, residual, weight, eps=1e-6),
        theirs=lambda: norm_reference.add_rms_norm(x, residual, weight, eps=1e-6),
        check=check,
        num_bytes=4 * x.nbytes,
    )


def add_rms_norm_in_order(model: Model, num_tokens: int) -> Work:
    x, residual, weight = randn(num_tokens, model.hidden), randn(num_tokens, model.hidden), randn(model.hidden)
    order, start = torch.randperm(model.hidden, device="cuda", dtype=torch.int32), residual.clone()
    theirs = lambda: norm_reference.add_rms_norm_in_order(x, start, weight, order, eps=1e-6)[0]  # noqa: E731
    ours = lambda: norms_in_order.add_rms_norm_in_order(x, residual, weight, order, eps=1e-6)[0]  # noqa: E731
    return Work(ours, theirs, theirs, num_bytes=4 * x.nbytes)


def columns(model: Model, num_tokens: int) -> Work:
    x, order = randn(num_tokens, model.hidden), torch.randperm(model.hidden, device="cuda", dtype=torch.int32)
    theirs = lambda: x.index_select(1, order)  # noqa: E731
    return Work(lambda: take_columns(x, order), theirs, theirs, num_bytes=2 * x.nbytes)


def silu_mul(model: Model, num_tokens: int) -> Work:
    gate_up = randn(num_tokens, 2 * model.intermediate)
    theirs = lambda: silu_reference(gate_up)  # noqa: E731
    return Work(lambda: activation.silu_mul(gate_up), theirs, theirs, num_bytes=gate_up.nbytes * 3 // 2)


def rotate_and_write_kv(model: Model, num_tokens: int) -> Work:
    """Theirs is what the plain decoder does: head norms, rotation, copies into the slots."""
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    qkv, cos_sin = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim), randn(4096, head_dim)
    num_blocks = num_tokens + 2
    positions = torch.randint(0, 4096, (num_tokens,), device="cuda")
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_tokens]
    cache = randn(num_blocks, BLOCK_SIZE, 2 * num_kv_heads, head_dim)
    caches = cache[:, :, :num_kv_heads], cache[:, :, num_kv_heads:]
    weights = (randn(head_dim), randn(head_dim)) if model.has_qk_norm else (None, None)
    options = {"num_heads": num_heads, "query_norm": weights[0], "key_norm": weights[1], "eps": 1e-6}
    weight = torch.cat([w.expand(n, -1) for w, n in zip(weights, (num_heads, num_kv_heads), strict=True)]) if model.has_qk_norm else None

    def theirs() -> Tensor:
        query_key, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if weight is not None:
            query_key = norm_reference.rms_norm(query_key, weight, eps=1e-6)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        rotated = rotary(query_key, cos, sin)
        write_kv(rotated[:, num_heads:], value, *caches, slots)
        return rotated[:, :num_heads]

    return Work(
        ours=lambda: rotary_kv.rotate_and_write_kv(qkv, cos_sin, positions, slots, *caches, **options),
        theirs=theirs,
        check=lambda: rotary_kv_reference(qkv, cos_sin, positions, slots, *caches, **options),
        num_bytes=2 * qkv.nbytes,
    )


def draw(model: Model, num_rows: int, name: str) -> Work:
    """Theirs is what the plain sampler does for such rows on CUDA."""
    logits = randn(num_rows, model.vocab_size) * 3
    temperature, top_k, top_p, min_p = DRAWS[name]
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    settings = {name: torch.full((num_rows,), value, device="cuda") for name, value in floats.items()} | {
        "top_k": torch.full((num_rows,), top_k, device="cuda"),
        "seeds": torch.arange(num_rows, device="cuda"),
        "output_indices": torch.arange(num_rows, device="cuda") + 5,
    }
    vocabulary = torch.arange(model.vocab_size, device="cuda", dtype=torch.int32)

    def theirs() -> Tensor:
        token_ids = logits.max(dim=-1).indices
        if name == "greedy":
            return token_ids
        scaled = logits.float() / settings["temperature"][:, None]
        if top_k == 0 and top_p == 1.0:
            floor = scaled.amax(dim=-1, keepdim=True) + torch.log(settings["min_p"])[:, None]
            noise = gumbel_noise(settings["seeds"], settings["output_indices"], vocabulary)
            return scaled.masked_fill_(scaled < floor, -math.inf).add_(noise).max(dim=-1).indices
        values, ids = order_candidates(scaled, 64 if top_k else model.vocab_size)
        kept, _ = keep_candidates(values, min_p=settings["min_p"], top_k=settings["top_k"], top_p=settings["top_p"])
        noisy = values.masked_fill(~kept, -math.inf).add_(gumbel_noise(settings["seeds"], settings["output_indices"], ids))
        return ids.gather(1, noisy.max(dim=-1, keepdim=True).indices).view(-1)

    return Work(
        ours=lambda: sampling.sample_tokens(logits, **settings, may_draw=name != "greedy").token_ids,
        theirs=theirs,
        check=lambda: sample_tokens_reference(logits, **settings).token_ids,
        num_bytes=logits.nbytes,
    )


def decode_inputs(num_rows: int) -> Work:
    """256 rows of up to 32,768 tokens, 2,048 of them known."""
    max_blocks = 32768 // BLOCK_SIZE + 1
    token_ids = torch.randint(0, 1000, (256, 32769), device="cuda", dtype=torch.int32)
    table = torch.randint(0, 100000, (256, max_blocks), device="cuda", dtype=torch.int32)
    lengths = torch.full((256,), 2048, device="cuda", dtype=torch.int32)
    rows = torch.randperm(256, device="cuda")[:num_rows]
    out, check = (DecodeInputs.allocate(num_rows, max_blocks, "cuda") for _ in range(2))

    def run_op(op: Callable[..., None], inputs: DecodeInputs) -> Tensor:
        op(token_ids, table, lengths, rows, block_size=BLOCK_SIZE, out=inputs)
        return inputs.slot_mapping

    return Work(
        ours=lambda: run_op(step_inputs.prepare_decode_inputs, out),
        theirs=lambda: run_op(prepare_reference, check),
        check=lambda: run_op(prepare_reference, check),
        num_bytes=num_rows * (2048 // BLOCK_SIZE * 8 + 40),
    )


def write_sampled(num_rows: int) -> Work:
    token_ids = torch.zeros(256, 32769, device="cuda", dtype=torch.int32)
    lengths = torch.ones(256, device="cuda", dtype=torch.int32)
    rows, sampled = torch.randperm(256, device="cuda")[:num_rows], torch.arange(num_rows, device="cuda")
    positions = torch.arange(num_rows, device="cuda") * 7

    def run_op(op: Callable[..., None], tokens: Tensor) -> Tensor:
        op(sampled, rows, positions, tokens, lengths)
        return tokens

    def theirs() -> Tensor:
        lengths.index_copy_(0, rows, (positions + 2).to(torch.int32))
        return token_ids.index_put_((rows, positions + 1), sampled.to(torch.int32))

    return Work(
        ours=lambda: run_op(step_inputs.write_sampled, token_ids),
        theirs=theirs,
        check=lambda: run_op(write_sampled_reference, token_ids.clone()),
        num_bytes=num_rows * 32,
    )


if __name__ == "__main__":
    main()
