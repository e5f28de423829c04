"""Quotas from the settings to the numbers: a whole engine on the fake runner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagedcore.config import EngineConfig
from pagedcore.core.limits import SchedulerLimits
from pagedcore.engine_build import scheduler_limits
from pagedcore.errors import ConfigError, TenantQuotaError
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.tenancy.limits import NO_TENANT_LIMITS, TenantLimits
from support.core_builders import Driver
from support.engine_builder import Built, make_engine, make_plan
from support.observed import Engine as ObservedEngine

SHORT = SamplingParams(max_tokens=4, temperature=0)


async def last_of(built: Built, number: int, tenant: str | None) -> RequestOutput:
    outputs = [output async for output in built.engine.generate([number, 1, 2, 3], SHORT, tenant=tenant)]
    return outputs[-1]


def value_of(engine: ObservedEngine, family: str, reason: str) -> float:
    return sum(value for name, value in engine.samples().items() if name.startswith(family) and f"reason={reason}" in name.replace('"', ""))


def test_the_settings_reach_the_scheduler() -> None:
    def limits(**options: Any) -> SchedulerLimits:
        return scheduler_limits(make_plan(**options))

    assert limits().tenants == NO_TENANT_LIMITS
    quotas = limits(max_running_per_tenant=3, max_waiting_per_tenant=9, cache_fraction_per_tenant=0.25).tenants
    assert quotas == TenantLimits(max_running=3, max_waiting=9, cache_fraction=0.25)
    assert (quotas.share_blocks(256), quotas.share_blocks(3), NO_TENANT_LIMITS.share_blocks(256)) == (64, 1, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running_per_tenant": 0}, "max_running_per_tenant is 0 and must be None or an integer of at least 1."),
        ({"max_waiting_per_tenant": 1.5}, "max_waiting_per_tenant is 1.5 and must be None or an integer of at least 1."),
        ({"cache_fraction_per_tenant": 0.0}, "cache_fraction_per_tenant is 0.0 and must be None or a number above 0 and at most 1."),
        ({"cache_fraction_per_tenant": float("nan")}, "must be None or a number above 0 and at most 1."),
        ({"cache_fraction_per_tenant": True}, "must be None or a number above 0 and at most 1."),
        ({"cache_fraction_per_tenant": 0.5, "enable_prefix_caching": False}, "set enable_prefix_caching."),
    ],
)
def test_a_wrong_quota_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_mapping(options)
    assert message in str(refused.value)


def test_a_flooding_tenant_waits_is_refused_and_counted_and_another_ones_requests_go_through() -> None:
    built = make_engine(gate_open=False, max_num_seqs=8, max_running_per_tenant=1, max_waiting_per_tenant=2)

    async def main() -> list[RequestOutput]:
        flood = [asyncio.create_task(last_of(built, 0, "flood"))]
        await asyncio.to_thread(built.runner.waiting.wait, 60.0)
        flood += [asyncio.create_task(last_of(built, number, "flood")) for number in range(1, 5)]
        shop = asyncio.create_task(last_of(built, 9, "shop"))
        await asyncio.sleep(0)
        built.runner.gate.set()
        return await asyncio.gather(*flood, shop)

    *flood, shop = asyncio.run(main())
    refused = [output for output in flood if output.status == "rejected"]
    assert [output.status for output in flood].count("completed") == 3
    assert all(isinstance(output.error, TenantQuotaError) and output.error.retry_after_s > 0 for output in refused)
    assert shop.status == "completed"
    built.settle()
    assert len(refused) == built.engine.stats().num_finished["rejected"] == 2
    waited = [life.waited_s for life in built.engine.history.lives() if life.request.tenant == "flood" and life.status == "completed"]
    assert sum("tenant_quota" in seconds for seconds in waited) == 2
    built.engine.close_sync()


def test_the_metrics_carry_the_reason() -> None:
    driver = Driver.make(tenants=TenantLimits(max_running=1, max_waiting=1))
    engine = ObservedEngine()
    for name in ("a0", "a1", "b0"):
        driver.add(name, [1, 2], tenant=name[0])
    with pytest.raises(TenantQuotaError):
        driver.add("a2", [1, 2], tenant="a")
    driver.schedule()
    for step in driver.steps:
        engine.recorder.record(step)
    assert value_of(engine, "pagedcore_waiting_requests", "tenant_quota") == 1
    assert value_of(engine, "pagedcore_rejected_requests_total", "tenant_quota") == 1
    assert value_of(engine, "pagedcore_rejected_requests_total", "queue_full") == 0
