"""One engine, one workload, one process: prints a JSON line with its seconds. `compare_cpu.py` runs these in turn.

Every engine gets the same token ids, decodes greedily and never stops early; loading and one warm-up request are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

from cpu_workloads import VOCAB, Work, batch_of_16, exponential_lengths

Run = Callable[[Work], float]


def pagedcore_engine(model: str, args: argparse.Namespace) -> Run:
    from pagedcore import LLM, SamplingParams

    random_weights = {"load_format": "dummy", "skip_tokenizer_init": True} if args.dummy else {}
    llm = LLM(model, max_num_seqs=args.rows, dtype=args.dtype, device=args.device, **random_weights)

    def run(work: Work) -> float:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work]
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == [count for _, count in work]
        return seconds

    return run


def pagedcore_static(model: str, args: argparse.Namespace) -> Run:
    """The same engine and kernels with static batches: `rows` requests at a time, each kept until the longest has ended."""
    run_batch = pagedcore_engine(model, args)

    def run(work: Work) -> float:
        seconds = 0.0
        for first in range(0, len(work), args.rows):
            batch = work[first : first + args.rows]
            longest = max(count for _, count in batch)
            seconds += run_batch([(prompt, longest) for prompt, _ in batch])
        return seconds

    return run


def _hf_model(model: str, args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype)).eval()


def transformers_static(model: str, args: argparse.Namespace) -> Run:
    """`generate` on padded batches of `rows`, each as long as its longest request."""
    import torch

    hf = _hf_model(model, args)

    def run(work: Work) -> float:
        start = time.perf_counter()
        for first in range(0, len(work), args.rows):
            batch = work[first : first + args.rows]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            count = max(count for _, count in batch)
            with torch.inference_mode():
                hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=2)
        return time.perf_counter() - start

    return run


def transformers_continuous(model: str, args: argparse.Namespace) -> Run:
    """transformers' own continuous batching, `generate_batch`."""
    from transformers import GenerationConfig

    hf = _hf_model(model, args)
    hf.set_attn_implementation("paged|sdpa")

    def run(work: Work) -> float:
        count = max(count for _, count in work)
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=2)
        start = time.perf_counter()
        outputs = hf.generate_batch([prompt for prompt, _ in work], generation_config=config, progress_bar=False)
        seconds = time.perf_counter() - start
        assert all(len(output.generated_tokens) == count for output in outputs.values())
        return seconds

    return run


def llama_cpp(model: str, args: argparse.Namespace) -> Run:
    """llama.cpp on the Q4_1 file through its batch interface: `rows` sequences in one context."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model_handle = llama_cpp.llama_model_load_from_file(args.gguf.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 2048, 512, args.rows
    params.n_threads, params.n_threads_batch, params.kv_unified = args.threads, args.threads, True
    context = llama_cpp.llama_init_from_model(model_handle, params)

    def decode(entries: list[tuple[int, int, int, bool]]) -> None:
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wants_logits
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_batch_free(batch)

    def best(index: int) -> int:
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), shape=(VOCAB,)).argmax())

    def run(work: Work) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        last: dict[int, tuple[int, int, int]] = {}  # sequence -> (token, position, tokens left)
        for sequence, (prompt, count) in enumerate(work):
            decode([(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)])
            last[sequence] = (best(len(prompt) - 1), len(prompt), count - 1)
        while last := {s: state for s, state in last.items() if state[2] > 0}:
            decode([(token, position, sequence, True) for sequence, (token, position, _) in last.items()])
            last = {s: (best(i), position + 1, left - 1) for i, (s, (_, position, left)) in enumerate(last.items())}
        return time.perf_counter() - start

    return run


def vllm_cpu(model: str, args: argparse.Namespace) -> Run:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=args.dtype, max_num_seqs=args.rows, max_model_len=2048, enforce_eager=False, disable_log_stats=True)

    def run(work: Work) -> float:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    return run


ENGINES: dict[str, Callable[[str, argparse.Namespace], Run]] = {
    "pagedcore": pagedcore_engine,
    "pagedcore-static": pagedcore_static,
    "transformers-static": transformers_static,
    "transformers-continuous": transformers_continuous,
    "llama.cpp": llama_cpp,
    "vllm-cpu": vllm_cpu,
}
WORKLOADS: dict[str, Callable[[], Work]] = {"batch16": batch_of_16, "exponential": exponential_lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", required=True, help="folder with safetensors weights")
    parser.add_argument("--gguf", default="", help="the same model for llama.cpp")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="batch16")
    parser.add_argument("--rows", type=int, default=16, help="requests in flight")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="of pagedcore")
    parser.add_argument("--dummy", action="store_true", help="pagedcore with random weights: config.json is enough")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    work = WORKLOADS[args.workload]()
    run = ENGINES[args.engine](args.model, args)
    run([(work[0][0][:16], 4)])
    seconds = [run(work) for _ in range(args.repeats)]
    print(json.dumps({"engine": args.engine, "seconds": seconds, "useful_tokens": sum(count for _, count in work)}), flush=True)


if __name__ == "__main__":
    main()
