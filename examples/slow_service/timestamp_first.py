"""A prompt with a timestamp in front: no two prompts begin alike, so the prefix cache serves nothing.

The page says at which token the prompts part, and the advice is to move what varies behind what is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stage import Facts, Scene, Stage, Story, main

from pagedcore import SamplingParams

INSTRUCTIONS = """\
You answer the letters of customers of a shop for bicycles in Lyon. Be friendly and short: three sentences, no lists, no promises. \
The shop opens from nine to seven, Tuesday to Saturday. Repairs take two days, before holidays five; a bicycle that is left for more \
than a month is stored at the customer's cost. New bicycles have a guarantee of two years on the frame and of six months on everything \
that turns. Tyres, chains and brake pads wear out and have none. What was ordered can be sent back within a fortnight, unused, in its \
own box; the customer pays the post, unless we sent the wrong thing. Money comes back the way it was paid, within ten days. We do not \
ship batteries by air. Parcels within France arrive in two or three days, in Europe within a week. If a parcel is late, look first \
whether the address was complete, then say that we ask the carrier. If somebody is angry, say that you are sorry once and go on to \
what can be done. Never name a colleague. If you do not know, say who will answer and when. Sign as the team of the shop."""

NUM_LETTERS = 18


def timestamp_first(time: str, letter: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": f"[{time}] {INSTRUCTIONS}"}, {"role": "user", "content": letter}]


def timestamp_last(time: str, letter: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": f"{letter} [{time}]"}]


def play(stage: Stage, layout: Callable[[str, str], list[dict[str, str]]]) -> Facts:
    llm, params = stage.llm, SamplingParams(temperature=0, max_tokens=2)
    for number in range(NUM_LETTERS):
        time = f"{9 + number // 4:02}:{13 * number % 60:02}"
        (last,) = llm.chat(layout(time, f"Order {4200 + number} has not arrived."), params)
    (why,) = llm.engine.inspect_sync("explain", request_id=last.request_id, show_text="all")
    for sentence in (*why["sentences"], *llm.advice().sentences):
        stage.say(sentence)
    stats = llm.stats()
    return {
        "prompt tokens": stats.prefix_cache_query_tokens,
        "of them computed": stats.computed_prompt_tokens,
        "hit rate (%)": 100 * stats.hit_rate(),
        "ideal hit rate (%)": 100 * stats.ideal_hit_rate,
        "prompts part at token": why["first_divergence"]["token"],
        "first token, median (ms)": stage.first_token_ms(),
    }


STORY = Story(
    "A prompt with a timestamp in front",
    before=Scene("timestamp first", {}, partial(play, layout=timestamp_first)),
    after=Scene("timestamp last", {}, partial(play, layout=timestamp_last)),
)

if __name__ == "__main__":
    main(STORY)
