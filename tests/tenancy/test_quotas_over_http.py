"""Quotas and priorities of tenants as clients meet them: the unmodified `openai` client, keys of tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import openai
import pytest

from pagedcore.cli import main
from pagedcore.commands.http_front import FrontPlan
from pagedcore.errors import ConfigError, TenantQuotaError
from pagedcore.http.api_keys import parse_tenant_priorities
from pagedcore.openai import ServerSettings, build_app
from support.fake_client import FakeClient, Script
from support.live_server import live_server

TENANTS = {"key of reports": "reports", "key of shop": "shop"}
SETTINGS = ServerSettings(api_keys=("operators",), tenants=TENANTS, tenant_priorities={"reports": 10, "": -1})


@contextmanager
def serving(settings: ServerSettings, *scripts: Script) -> Iterator[tuple[openai.OpenAI, FakeClient]]:
    fake = FakeClient(*scripts)
    with live_server(build_app(fake, settings)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="operators", max_retries=0) as client:
        yield client, fake


def ask(client: openai.OpenAI, key: str, **body: Any) -> None:
    client.with_options(api_key=key).chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": "hi"}], extra_body=body
    )


def test_a_tenant_over_its_quota_gets_a_429_that_says_when_to_come_back() -> None:
    error = TenantQuotaError("2 requests of the tenant 'reports' wait and max_waiting_per_tenant is 2; try again later.")
    with (
        serving(SETTINGS, Script(error=error)) as (client, _),
        pytest.raises(openai.RateLimitError, match="max_waiting_per_tenant is 2") as caught,
    ):
        ask(client, "key of reports")
    assert (caught.value.code, caught.value.type, caught.value.response.headers["Retry-After"]) == ("tenant_quota", "rate_limit_error", "1")


def test_the_host_gives_each_tenant_its_priority() -> None:
    with serving(SETTINGS) as (client, fake):
        for key in ("key of reports", "key of shop", "operators"):
            ask(client, key)
    assert [(seen.context.tenant, seen.context.priority) for seen in fake.seen] == [("reports", 10), ("shop", 0), (None, -1)]


@pytest.mark.parametrize("priority", [0, -5])
def test_a_body_may_then_give_none(priority: int) -> None:
    with (
        serving(SETTINGS) as (client, fake),
        pytest.raises(openai.BadRequestError, match=f"priority is {priority}, and this server sets it") as caught,
    ):
        ask(client, "key of reports", priority=priority)
    assert caught.value.param == "priority"
    assert not fake.seen


def test_or_it_is_left_out_where_the_host_says_so() -> None:
    settings = ServerSettings(tenants=TENANTS, tenant_priorities={"reports": 10}, ignored_fields=("priority",))
    with serving(settings) as (client, fake):
        ask(client, "key of reports", priority=-5)
    assert [seen.context.priority for seen in fake.seen] == [10]


def test_without_priorities_of_the_host_the_body_gives_its_own() -> None:
    with serving(ServerSettings(tenants=TENANTS)) as (client, fake):
        ask(client, "key of shop", priority=3)
    assert [seen.context.priority for seen in fake.seen] == [3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tenant_priorities": {"shops": 1}}, "names 'shops', and no key in tenants is theirs"),
        ({"tenant_priorities": {"shop": 2**31}}, "priority of the tenant 'shop' is 2147483648 and must be a 32-bit integer"),
        ({"tenant_priorities": {"shop": True}}, "must be a 32-bit integer"),
        ({"ignored_fields": ("priority",)}, "ignored_fields holds priority, which this server obeys"),
    ],
)
def test_wrong_priorities_are_refused_at_the_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(tenants=TENANTS, **changes)


def test_the_hosts_own_code_may_name_tenants_that_have_no_key() -> None:
    assert ServerSettings(tenant_of=lambda _: "shops", tenant_priorities={"shops": 1}).tenant_priorities == {"shops": 1}


def test_priorities_are_read_as_name_and_number() -> None:
    assert parse_tenant_priorities(["reports=10", "a=b=-1", "=3"]) == {"reports": 10, "a=b": -1, "": 3}
    for pairs, message in ((["reports"], "has the form NAME=NUMBER"), (["a=x"], "'a=x' has not"), (["a=1", "a=1"], "has two priorities")):
        with pytest.raises(ConfigError, match=message):
            parse_tenant_priorities(pairs)


def test_a_front_in_a_process_of_its_own_has_the_same_priorities() -> None:
    plan = FrontPlan(engine_socket="/run/e.sock", host="127.0.0.1", port=8000, settings=SETTINGS, drain_timeout_s=7.0)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=FrontPlan).settings.tenant_priorities == {"reports": 10, "": -1}


def test_the_command_line_refuses_priorities_that_no_engine_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--tenant-key", "reports=k", "--tenant-priority", "reports=10"])
    assert ended.value.code == 2
    assert "give --scheduling-policy priority, too" in capsys.readouterr().err
