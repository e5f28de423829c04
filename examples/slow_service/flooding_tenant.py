"""One tenant floods: it sends all its work at once, and whoever comes later waits behind it.

The page shows whose requests are open and what the others wait for. What cures here is an order: `scheduling_policy="priority"`,
and a higher number (later) for the requests of the tenant that can wait. The number is given by whoever calls the engine: code that
embeds it, or a server with `tenant_priorities`. Quotas of rows, of the queue and of the cache cure it, too, without a list of
tenants: `max_running_per_tenant`, `max_waiting_per_tenant`, `cache_fraction_per_tenant`.
"""

from __future__ import annotations

import asyncio
from functools import partial

from stage import Facts, Scene, Stage, Story, main

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.tracing.life import Life

NUM_REPORTS = 16
NUM_ORDERS = 3
MAX_NUM_SEQS = 4


async def report(engine: AsyncEngine, number: int, priority: int, begun: asyncio.Event) -> None:
    params = SamplingParams(temperature=0, max_tokens=8 + 3 * (number % 4), ignore_eos=True)
    prompt = f"Report {number} of the night, in full:"
    async for _ in engine.generate(prompt, params, f"report-{number}", tenant="reports", priority=priority):
        begun.set()


async def order(engine: AsyncEngine, number: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async for _ in engine.generate(f"Order {number}: one lamp. Thank you,", params, f"order-{number}", tenant="shop"):
        pass


async def both(engine: AsyncEngine, priority_of_reports: int) -> None:
    """All reports at once; then a customer of the shop orders, and orders again after each answer."""
    begun = asyncio.Event()
    reports = [asyncio.create_task(report(engine, number, priority_of_reports, begun)) for number in range(NUM_REPORTS)]
    await begun.wait()
    for number in range(NUM_ORDERS):
        await order(engine, number)
    await asyncio.gather(*reports)


def play(stage: Stage, priority_of_reports: int) -> Facts:
    engine = stage.llm.engine
    asyncio.run(both(engine, priority_of_reports))
    lives = engine.history.lives()
    orders, reports = ([life for life in lives if life.request.tenant == tenant] for tenant in ("shop", "reports"))
    waited = {reason: 1000 * seconds for reason, seconds in orders[0].waited_s.items() if seconds >= 0.001}
    return {
        "reports let in while an order waited": sum(_is_let_in_before(report, order) for report in reports for order in orders),
        "the first order waited for": ", ".join(f"{reason} {ms:,.0f} ms" for reason, ms in waited.items()),
        "first token of the slowest order (ms)": 1000 * max((order.first_token_s or 0.0) - order.request.arrival_s for order in orders),
        "all reports done after (s)": max(life.finished_s or 0.0 for life in reports) - min(life.request.arrival_s for life in reports),
        "tokens generated": stage.llm.stats().generation_tokens,
    }


def _is_let_in_before(report: Life, order: Life) -> bool:
    """After the order had come to the queue."""
    queued_s = next(event.at_s for event in order.events if event.name == "queued")
    return queued_s < (report.admitted_s or 0.0) < (order.admitted_s or 0.0)


STORY = Story(
    "One tenant floods",
    before=Scene("first come, first served", {"max_num_seqs": MAX_NUM_SEQS}, partial(play, priority_of_reports=0)),
    after=Scene("by priority", {"max_num_seqs": MAX_NUM_SEQS, "scheduling_policy": "priority"}, partial(play, priority_of_reports=1)),
)

if __name__ == "__main__":
    main(STORY)
