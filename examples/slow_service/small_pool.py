"""A pool that is too small: prompts are computed, evicted before they come again, and computed once more.

Misses are `evicted`, missed blocks are found among the ghosts, and the curve of the advice says what a larger pool would have given.
The cure takes its word: the same traffic on the pool that it names.
"""

from __future__ import annotations

import random

from stage import Facts, Scene, Stage, Story, main

from pagedcore import SamplingParams

MACHINES = ("lathe", "loom", "press", "kiln", "crane", "pump", "saw", "mill", "drill", "oven", "winch", "forge")

RULES = (
    "Read the plate on the left side before anything else.",
    "The red lever stops everything at once and may be pulled by anybody.",
    "Oil goes into the upper cup, a thimble of it, every morning before the belt moves.",
    "Do not open the hood while the wheel turns, not even to look.",
    "When the lamp is yellow the water is low; fill it up to the second mark.",
    "A knocking noise means that the bearing is dry, a whistling one that the filter is full.",
    "Two people lift the cover, one on each side, with gloves.",
    "Write the hours into the book that hangs by the door.",
    "Spare belts lie in the blue box, sorted by length.",
    "After rain, wait an hour before the first run.",
    "The guard must click twice, or the motor does not start.",
    "Clean the glass with warm water only, since soap leaves a film.",
    "Twice a year the chain is taken off, boiled and greased.",
    "If the needle passes nine, turn the small tap until it comes back to six.",
)

NUM_QUESTIONS = 40
NUM_BLOCKS = 46


def manual(machine: str) -> str:
    """The same words each time, in an order of its own."""
    rules = random.Random(machine).sample(RULES, 7)
    return f"The {machine}. {' '.join(rules)}"


def play(stage: Stage) -> Facts:
    llm, draw = stage.llm, random.Random(0)
    for number in range(NUM_QUESTIONS):
        question = f"{manual(draw.choice(MACHINES))}\n\nQuestion {number}: what is checked first?\nAnswer:"
        llm.generate(question, SamplingParams(temperature=0, max_tokens=2))
    advice, stats, blocks = llm.advice(), llm.stats(), llm.engine.plan.num_blocks
    for sentence in advice.sentences:
        stage.say(sentence)
    twice = next((p.hit_rate for p in advice.curve if p.num_blocks == 2 * NUM_BLOCKS and p.block_size == llm.engine.plan.block_size), 0.0)
    return {
        "blocks of the pool": blocks,
        "hit rate (%)": 100 * stats.hit_rate(),
        "ideal hit rate (%)": 100 * stats.ideal_hit_rate,
        f"the advice's hit rate for {2 * NUM_BLOCKS} blocks (%)": 100 * twice,
        "blocks missed since evicted": stats.miss_blocks["evicted"],
        "evictions": stats.pool_evictions,
        "ghost hits": stats.pool_ghost_hits,
        "prompt tokens computed twice": stats.miss_penalty_tokens["evicted"],
        "first token, median (ms)": stage.first_token_ms(),
    }


STORY = Story(
    "A pool that is too small",
    before=Scene(f"{NUM_BLOCKS} blocks", {"num_kv_blocks": NUM_BLOCKS}, play),
    after=Scene(f"{2 * NUM_BLOCKS} blocks", {"num_kv_blocks": 2 * NUM_BLOCKS}, play),
)

if __name__ == "__main__":
    main(STORY)
