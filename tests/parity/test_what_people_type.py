"""The forms that people type for another engine, with the names replaced, on the real model."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import pagedcore
from pagedcore import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineConfig, RequestOutput, SamplingParams
from pagedcore.errors import UnknownOptionError
from pagedcore.models.embedded import EMBEDDED_NAME, ensure_embedded_model
from support.served import free_port, serve

pytestmark = pytest.mark.model

SMALL: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 512}
PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
ANSWER = " Paris."


def folder() -> str:
    return str(ensure_embedded_model())


def text_of(outputs: list[RequestOutput]) -> str:
    return outputs[0].outputs[0].text


# ---- LLM


@pytest.mark.parametrize("positional", [True, False])
def test_the_constructor_with_the_settings_people_name(positional: bool) -> None:
    settings = {"block_size": 16, "max_num_seqs": 256, "kv_cache_dtype": "auto", "trust_remote_code": False, **SMALL}
    llm = LLM(folder(), **settings) if positional else LLM(model=folder(), **settings)
    with llm:
        plan = llm.engine.plan
        assert (plan.block_size, plan.config.max_num_seqs, plan.kv_cache_dtype) == (16, 256, "float32")
        assert str(llm.model_dir) == folder()
        assert text_of(llm.generate(PROMPT, GREEDY)).startswith(ANSWER)
        assert text_of(llm.generate([PROMPT], sampling_params=GREEDY)).startswith(ANSWER)
        assert llm.stats().device_memory_bytes >= plan.memory.weights_bytes + plan.memory.kv_cache_bytes > 500_000_000


def test_the_embedded_model_may_be_named_or_left_out() -> None:
    with LLM(model=EMBEDDED_NAME, **SMALL) as named:
        assert str(named.model_dir) == folder()
        assert named.engine.plan.served_model_names == (EMBEDDED_NAME,)


def test_another_tokenizer_is_really_used(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(folder()) / name, tmp_path / name)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with LLM(model=folder(), tokenizer=str(tmp_path), **SMALL) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
        assert output.prompt == "[Hi]"
        assert str(llm.model_dir) == folder()


def test_the_seed_setting_decides_what_unseeded_requests_draw() -> None:
    def drawn(seed: int) -> list[list[int]]:
        with LLM(model=folder(), seed=seed, **SMALL) as llm:
            outputs = llm.generate([PROMPT] * 2, SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True))
            return [output.outputs[0].token_ids for output in outputs]

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_settings_that_do_not_exist_name_the_nearest_before_anything_is_loaded() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean 'max_num_batched_tokens'"):
        LLM(model=folder(), max_num_batched_token=64)
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        AsyncLLMEngine(model=folder(), gpu_memory_utilisation=0.9)


# ---- AsyncLLMEngine


FORMS: dict[str, Callable[[], AsyncLLMEngine]] = {
    "engine-args": lambda: AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=folder(), delay_factor=0.01, **SMALL)),
    "config": lambda: AsyncLLMEngine.from_engine_args(EngineConfig(model=folder(), max_batch_wait_ms=10, **SMALL)),
    "mapping": lambda: AsyncLLMEngine.from_engine_args({"model": folder(), "delay_factor": 0.01, **SMALL}),
    "keywords": lambda: AsyncLLMEngine(model=folder(), max_batch_wait_ms=10, **SMALL),
}


@contextmanager
def closed_at_the_end(engine: AsyncLLMEngine) -> Iterator[AsyncLLMEngine]:
    try:
        yield engine
    finally:
        engine.shutdown()


async def pieces_of(engine: AsyncLLMEngine, request_id: str | None = None) -> list[RequestOutput]:
    """With the request id, or without it, as both are typed."""
    stream = engine.generate(PROMPT, GREEDY) if request_id is None else engine.generate(PROMPT, GREEDY, request_id)
    return [output async for output in stream]


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_is_made_in_each_form_with_no_running_loop(form: str) -> None:
    with closed_at_the_end(FORMS[form]()) as engine:
        assert engine.config.max_batch_wait_ms == 10.0
        outputs = asyncio.run(pieces_of(engine, "my-id"))
        assert {output.request_id for output in outputs} == {"my-id"}
        assert outputs[-1].outputs[0].text.startswith(ANSWER)
        assert "".join(output.text for output in outputs) == outputs[-1].outputs[0].text
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_one_engine_serves_several_loops_and_a_stream_left_early_is_aborted() -> None:
    async def leave(engine: AsyncLLMEngine) -> str:
        text = ""
        async for output in engine.generate(PROMPT, GREEDY.replace(max_tokens=400, ignore_eos=True)):
            text = output.outputs[0].text
            if len(text) > 3:
                break
        return text

    found: list[str] = []
    with closed_at_the_end(AsyncLLMEngine(model=folder(), **SMALL)) as engine:
        threads = [threading.Thread(target=lambda: found.append(asyncio.run(pieces_of(engine))[-1].outputs[0].text)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert ANSWER.startswith(asyncio.run(leave(engine))[:3])
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        assert len(found) == 3
        assert found[0].startswith(ANSWER)
        engine.check()
        assert engine.stats().num_finished["aborted"] == 1
        assert engine.stats().num_running == 0


def test_the_aliases_are_the_engine_itself() -> None:
    assert AsyncLLMEngine is pagedcore.AsyncEngine


# ---- python -m ...


GREP_SCRIPT = """
import sys
import urllib.request

text = urllib.request.urlopen(sys.argv[1] + "/metrics").read().decode()
lines = [line for line in text.splitlines() if "cache_hit_rate" in line]
print(lines[-1].split()[-1])
"""


@pytest.mark.serve
@pytest.mark.slow
def test_the_api_server_module_serves_with_its_flags_and_a_script_that_greps_metrics_reads_the_hit_rate(tmp_path: Path) -> None:
    port = free_port()
    flags = {"model": folder(), "host": "127.0.0.1", "port": port, "served-model-name": "N", "api-key": "K", "dtype": "float32"}
    arguments = ["-m", "pagedcore.entrypoints.openai.api_server", "--max-model-len", "512", "--num-kv-blocks", "64"]
    for name, value in flags.items():
        arguments += [f"--{name}", str(value)]
    prompt = "A sentence that is long enough to fill a block of sixteen tokens, and then to go on for a little while more."
    with serve(arguments, tmp_path / "server.log", port=port, ready_path="/ready") as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="K", max_retries=0, timeout=120) as client:
            (model,) = client.models.list()
            assert (model.id, model.model_dump()["max_model_len"]) == ("N", 512)
            replies = [client.completions.create(model="N", prompt=prompt, temperature=0, max_tokens=4) for _ in range(2)]
            with pytest.raises(openai.NotFoundError, match="N"):
                client.completions.create(model="other", prompt=prompt)
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()
        script = subprocess.run([sys.executable, "-c", GREP_SCRIPT, served.url], capture_output=True, text=True, check=True)
    assert replies[0].choices[0].text == replies[1].choices[0].text
    usage = replies[1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert float(script.stdout) == pytest.approx(cached / (2 * usage.prompt_tokens))
    assert float(script.stdout) > 0.2
