"""After its warm-up an engine compiles nothing, whatever comes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.gpu_workloads import write_shape
from pagedcore import LLM, SamplingParams

pytestmark = pytest.mark.gpu

DRAWN = SamplingParams(temperature=0.7, ignore_eos=True)
KINDS = [
    DRAWN.replace(temperature=0.0),
    DRAWN,
    DRAWN.replace(top_p=0.9, top_k=20),
    DRAWN.replace(top_p=0.95, logprobs=2),
    DRAWN.replace(min_p=0.05, repetition_penalty=1.1),
]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen3-0.6b", {}),
        ("qwen3-0.6b", {"enforce_eager": True}),
        ("qwen3-0.6b", {"kv_cache_dtype": "fp8"}),
        ("qwen2.5-7b", {}),
        ("llama2-7b-gptq", {}),
        ("llama2-7b-gptq-act-order", {}),
        ("llama2-7b-gptq-act-order", {"enforce_eager": True}),
        ("llama2-7b-awq", {"enforce_eager": True}),
    ],
    ids=["graphs", "eager", "fp8", "larger", "packed", "act-order", "act-order, eager", "packed, eager"],
)
def test_traffic_of_every_kind_compiles_nothing(
    shape: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[str] = []

    def note(*, fn: object, **facts: object) -> None:
        compiled.append(str(getattr(fn, "name", fn)))

    draw = random.Random(0)
    with LLM(str(write_shape(shape, tmp_path)), load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=2000, **options) as llm:
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
        for lengths in ([1], [7, 900], [5] * 40, [16, 513, 3000, 1], [9000, 40], [100] * 256):
            prompts = [[draw.randrange(10_000) for _ in range(length)] for length in lengths]
            for kind in KINDS:
                params = [kind.replace(max_tokens=draw.randint(1, 12)) for _ in lengths]
                llm.generate(prompts, params, use_tqdm=False)
        assert not compiled, f"{len(compiled)} kernels were compiled after the warm-up: {sorted(set(compiled))}"
