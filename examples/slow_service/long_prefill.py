"""A long prompt holds up everybody's answers: one step computes all of it, and no running request gets a token meanwhile.

The page says how long answers stood still and what the step computed; the trace file shows the step. The cure is a smaller
`max_num_batched_tokens`: the prompt is computed in pieces, and each step brings everybody's next token too.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from stage import Facts, Scene, Stage, Story, main

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.console.findings import findings
from pagedcore.console.indicators import Targets

NUM_CHATS = 3
CONTRACT = " ".join(
    f"Clause {number}: the tenant of flat {number} keeps the stairs clean and tells us of every leak." for number in range(44)
)


async def chat(engine: AsyncEngine, number: int, is_under_way: asyncio.Event) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    async for output in engine.generate(f"Chat {number}: once upon a time", params, f"chat-{number}"):
        if len(output.outputs[0].token_ids) >= 8:
            is_under_way.set()


async def contract(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    async for _ in engine.generate(f"{CONTRACT}\nIn short:", params, "contract"):
        pass


async def chats_and_a_contract(engine: AsyncEngine) -> None:
    """Some chats are being answered when somebody hands in a contract."""
    is_under_way = asyncio.Event()
    chats = [asyncio.create_task(chat(engine, number, is_under_way)) for number in range(NUM_CHATS)]
    await is_under_way.wait()
    await asyncio.gather(contract(engine), *chats)


def trace_file(max_num_batched_tokens: int) -> Path:
    return Path(tempfile.gettempdir()) / f"long-prefill-{max_num_batched_tokens}.json"


def play(stage: Stage) -> Facts:
    engine = stage.llm.engine
    asyncio.run(chats_and_a_contract(engine))
    engine.trace(trace_file(engine.plan.max_num_batched_tokens))
    (stats,) = engine.inspect_sync("stats")
    for sentence in findings(stats, Targets()):
        stage.say(sentence)
    stage.say(f"The trace file is {trace_file(engine.plan.max_num_batched_tokens)}")
    record = engine.history.find("contract") or {}
    return {
        "max_num_batched_tokens": engine.plan.max_num_batched_tokens,
        "tokens of the contract": record["prompt_tokens"],
        "steps that computed it": sum(event["name"] == "prefill_chunk" for event in record["events"]),
        "tokens of the largest step": max(step.num_tokens for step in engine.history.steps()),
        "longest wait for a next token (ms)": 1000 * stats["last_minute"]["token_gap_max_s"],
        "usual wait (ms)": 1000 * stats["last_minute"]["token_gap_p50_s"],
        "first token of the contract (ms)": record["ttft_ms"],
    }


STORY = Story(
    "A long prompt holds up everybody's answers",
    before=Scene("as it comes", {}, play),
    after=Scene("in pieces", {"max_num_batched_tokens": 64}, play),
)

if __name__ == "__main__":
    main(STORY)
