"""An offline script written for vLLM's `LLM` class; only the import is another: `python examples/migrate_from_vllm.py [model]`.

With no model named it runs on the embedded one, which needs no hub; its original there is HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import sys

from pagedcore import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "The capital of Japan is",
    "Red, yellow and blue are the three primary",
]


def main(model: str) -> None:
    sampling_params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=12, stop=["\n"])
    llm = LLM(model=model, max_model_len=1024, max_num_seqs=64, gpu_memory_utilization=0.9, enable_prefix_caching=True, seed=0)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(messages, sampling_params)
    print(answer.outputs[0].text, f"({len(answer.prompt_token_ids)} prompt tokens, {answer.num_cached_tokens} of them cached)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
