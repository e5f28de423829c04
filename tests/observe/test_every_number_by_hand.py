"""One story on a fake clock, and every family's number computed by hand from it. Blocks of 4 tokens, a pool of 64.

==========  ===================================================================================================================
    1000.0  "a" (tenant acme, class chat, through LitServe) arrives: 13 tokens, so 3 eligible blocks; nobody has sent them before.
    1000.5  It is admitted, takes 4 fresh blocks, and all of it goes into step 1.
    1001.0  Step 1 (13 tokens of one sequence) is committed: its first token.
    1001.5  Step 2, submitted at 1001.25, brings its second and last token. One more, behind a stop string, is discarded.
    1002.0  A block that was filled 8 s ago, reused twice, and idle for half a second, is evicted.
    1010.0  "d" (no tenant, library) arrives: 27 tokens, 6 eligible blocks: one live, one from the pool, one from host memory, then
            the block evicted at 1002, one that another request computes, and one behind this hole. It is admitted at once and
            takes 2 cached blocks (one 4 s after its last use) and 6 fresh ones, into one of which host memory is copied back; two
            blocks were copied to host memory to make room.
    1012.0  Step 3, submitted at 1010, is committed: 10 of its tokens (the evicted block, the one in flight, half of the third), and
            6 of others.
    1013.0  It is preempted.
    1014.0  It comes back and computes 4 tokens again.
    1015.0  Its caller leaves: 10 prompt tokens were computed, 5 never.
    1016.0  "e" (LangChain) is refused: too long. "f" fails on the device after 0.25 s.
    1065.0  Somebody looks.
==========  ===================================================================================================================
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from pagedcore.core.events import Admitted, Arrived, BlockEvicted, FirstToken, Preempted, PrefillChunk, Resumed
from pagedcore.observe.catalogue import FAMILIES
from pagedcore.observe.exposition import metrics_text
from support.observed import Engine, block_hash, make_add, make_finished, make_lookup, sample_key
from support.promql import family_of

INFO = {
    "version": "1", "backend": "torch", "block_size": 4, "num_blocks": 64, "kv_cache_dtype": "auto", "dtype": "float32",
    "quantization": "none", "linear_backend": "torch", "device": "cpu",
}  # fmt: skip


def live_through_it() -> Engine:
    engine = Engine(**INFO, device_memory_bytes={"weights": 100, "kv_cache": 50, "graphs": 7})
    engine.recorder.set_device_utilization(0.25)
    for received in (make_add("a", tenant="acme", request_class="chat", adapter="litserve"), make_add("d"), make_add("not taken yet")):
        engine.recorder.received(received)
    _first_request(engine)
    engine.clock.now_s = 1002.0
    engine.step(BlockEvicted(block_hash("evicted"), 1002.0, 2, 8.0, 0.5))
    _second_request(engine)
    engine.clock.now_s = 1016.0
    refused, failing = make_add("e", num_tokens=99, arrival_s=1016.0, adapter="langchain"), make_add("f", arrival_s=1015.75)
    engine.step(Arrived(refused, 1016.0), make_finished(refused, 1016.0, "rejected", reject_reason="too_long"))
    engine.step(
        Arrived(failing, 1016.0), make_finished(failing, 1016.0, "error"),
        num_running=3, num_waiting=3, num_swapped=1, waiting_by_reason={"blocks": 2, "priority": 1},
        num_active_blocks=16, num_cached_blocks=4, num_free_blocks=44, num_live_tokens=48,
    )  # fmt: skip
    engine.clock.now_s = 1065.0
    return engine


def _first_request(engine: Engine) -> None:
    request = make_add("a", num_tokens=13, arrival_s=1000.0, tenant="acme", request_class="chat", adapter="litserve")
    engine.step(Arrived(request, 1000.0), num_running=0)
    engine.clock.now_s = 1001.0
    events = [Admitted("a", 1000.5, make_lookup("1", "2", "3")), PrefillChunk("a", 1000.5, 13, step_id=1), FirstToken("a", 1001.0)]
    engine.step(*events, step_id=1, submitted_s=1000.5, num_tokens=13, num_sequences=1, num_fresh_acquisitions=4)
    engine.clock.now_s = 1001.5
    end = make_finished(
        request,
        1001.5,
        num_output_tokens=2,
        num_discarded_tokens=1,
        num_computed_prompt_tokens=13,
        first_token_s=1001.0,
        last_token_s=1001.5,
    )
    engine.step(end, step_id=2, submitted_s=1001.25, num_tokens=1, num_sequences=1, inter_token_gaps_s=[0.5])


def _second_request(engine: Engine) -> None:
    request = make_add("d", num_tokens=27, arrival_s=1010.0)
    on_device = make_lookup("evicted", "computing?", "behind!", live=1, pool=1, tail=3)
    lookup = replace(on_device, host_blocks=1, num_eligible_blocks=6, num_prompt_tokens=27)
    engine.clock.now_s = 1010.0
    engine.step(
        Arrived(request, 1010.0), Admitted("d", 1010.0, lookup), PrefillChunk("d", 1010.0, 10, step_id=3), num_running=0,
        num_reused_acquisitions=2, num_fresh_acquisitions=6, reuse_gaps_s=[4.0], num_swapped_out_blocks=2, num_swapped_in_blocks=1,
    )  # fmt: skip
    engine.clock.now_s = 1012.0
    engine.step(step_id=3, submitted_s=1010.0, num_tokens=16, num_sequences=3)
    engine.clock.now_s = 1013.0
    engine.step(Preempted("d", 1013.0, 22, 1.0, 0.5))
    engine.clock.now_s = 1014.0
    engine.step(Resumed("d", 1014.0, 4))
    engine.clock.now_s = 1015.0
    engine.step(make_finished(request, 1015.0, "aborted", num_computed_prompt_tokens=10, num_abandoned_prompt_tokens=5))


def requests(status: str, reason: str, adapter: str, tenant: str = "", request_class: str = "") -> dict[str, str]:
    return {"status": status, "finish_reason": reason, "adapter": adapter, "tenant": tenant, "class": request_class}


TENANTS = ({"tenant": "acme"}, {"tenant": ""})
BY_HAND: tuple[tuple[str, dict[str, str], float], ...] = (
    # L2 since the start: (0 + 3 blocks of 4) of 13 + 27 tokens.
    ("cache_hit_rate", {}, 12 / 40),
    ("cache_level_hit_rate", {"level": "prefix", "window": "total"}, 12 / 40),
    # L1: of 3 + 6 eligible blocks the live one, the pooled one and the one behind the hole are on the device.
    ("cache_level_hit_rate", {"level": "page", "window": "total"}, 3 / 9),
    # L3: 2 of 4 + 2 + 6 acquisitions.
    ("cache_level_hit_rate", {"level": "pool", "window": "total"}, 2 / 12),
    # The minute from 1006 on has "d" alone.
    ("cache_level_hit_rate", {"level": "prefix", "window": "1m"}, 12 / 27),
    ("cache_level_hit_rate", {"level": "page", "window": "1m"}, 3 / 6),
    ("cache_level_hit_rate", {"level": "pool", "window": "1m"}, 2 / 8),
    # An unbounded cache would have served all six blocks of "d".
    ("cache_ideal_hit_rate", {"window": "total"}, 24 / 40),
    ("cache_ideal_hit_rate", {"window": "1m"}, 24 / 27),
    ("prefix_cache_ideal_hit_tokens_total", {}, 24),
    ("page_lookups_total", {}, 9),
    ("page_hits_total", {}, 3),
    ("prefix_cache_queries_tokens_total", TENANTS[0], 13),
    ("prefix_cache_queries_tokens_total", TENANTS[1], 27),
    ("prefix_cache_hit_tokens_total", {"source": "live", "tenant": ""}, 4),
    ("prefix_cache_hit_tokens_total", {"source": "pool", "tenant": ""}, 4),
    ("prefix_cache_hit_tokens_total", {"source": "host", "tenant": ""}, 4),
    # 40 = 12 hit + 23 computed + 5 abandoned.
    ("computed_prompt_tokens_total", {}, 13 + 10),
    ("abandoned_prompt_tokens_total", {}, 5),
    ("pool_acquired_blocks_total", {"kind": "reused"}, 2),
    ("pool_acquired_blocks_total", {"kind": "fresh"}, 4 + 6),
    ("pool_ghost_hits_total", {}, 1),
    ("pool_evictions_total", {}, 1),
    # 3 blocks of "a", 3 of "d": with the 3 that were served, the 9 eligible ones.
    ("cache_miss_blocks_total", {"reason": "cold"}, 3),
    ("cache_miss_blocks_total", {"reason": "evicted"}, 1),
    ("cache_miss_blocks_total", {"reason": "in_flight"}, 1),
    ("cache_miss_blocks_total", {"reason": "hole"}, 1),
    # Step 3 lasts 2 s; 4 + 4 of its 16 tokens had been computed before.
    ("miss_penalty_tokens_total", {"reason": "evicted"}, 4),
    ("miss_penalty_tokens_total", {"reason": "in_flight"}, 4),
    ("miss_penalty_seconds_total", {"reason": "evicted"}, 2.0 * 4 / 16),
    ("miss_penalty_seconds_total", {"reason": "in_flight"}, 2.0 * 4 / 16),
    ("block_reuses_sum", {}, 2),
    ("block_reuses_count", {}, 1),
    ("block_lifetime_seconds_sum", {}, 8.0),
    ("block_lifetime_seconds_count", {}, 1),
    ("block_idle_seconds_sum", {}, 0.5),
    ("block_idle_seconds_count", {}, 1),
    ("block_reuse_gap_seconds_sum", {}, 4.0),
    ("block_reuse_gap_seconds_count", {}, 1),
    ("blocks", {"state": "active"}, 16),
    ("blocks", {"state": "cached"}, 4),
    ("blocks", {"state": "free"}, 44),
    ("kv_cache_usage_ratio", {}, 16 / 64),
    ("kv_utilization_ratio", {}, 48 / (16 * 4)),
    ("swapped_blocks_total", {"direction": "out"}, 2),
    ("swapped_blocks_total", {"direction": "in"}, 1),
    # Three are in the queue, one of them swapped out.
    ("open_requests", {"state": "running"}, 3),
    ("open_requests", {"state": "waiting"}, 2),
    ("open_requests", {"state": "swapped"}, 1),
    ("waiting_requests", {"reason": "blocks"}, 2),
    ("waiting_requests", {"reason": "priority"}, 1),
    ("received_requests_total", {"adapter": "litserve", "tenant": "acme", "class": "chat"}, 1),
    ("received_requests_total", {"adapter": "library", "tenant": "", "class": ""}, 2),
    ("requests_total", requests("completed", "stop", "litserve", "acme", "chat"), 1),
    ("requests_total", requests("aborted", "", "library"), 1),
    ("requests_total", requests("rejected", "", "langchain"), 1),
    ("requests_total", requests("error", "", "library"), 1),
    ("rejected_requests_total", {"reason": "too_long"}, 1),
    ("preemptions_total", {}, 1),
    ("recomputed_tokens_total", {}, 4),
    ("discarded_tokens_total", {}, 1),
    ("prompt_tokens_total", TENANTS[0], 13),
    ("prompt_tokens_total", TENANTS[1], 27),
    ("generation_tokens_total", TENANTS[0], 2),
    # "a" waited half a second, "d" not at all.
    ("time_in_queue_seconds_sum", {}, 0.5),
    ("time_in_queue_seconds_count", {}, 2),
    ("time_to_first_token_seconds_sum", {}, 1.0),
    ("time_to_first_token_seconds_count", {}, 1),
    ("inter_token_latency_seconds_sum", {}, 0.5),
    ("inter_token_latency_seconds_count", {}, 1),
    ("time_per_output_token_seconds_sum", {}, 0.5),
    ("time_per_output_token_seconds_count", {}, 1),
    # 1.5 s of "a", 5 s of "d", 0.25 s of "f"; "e" was refused.
    ("request_latency_seconds_sum", {}, 1.5 + 5.0 + 0.25),
    ("request_latency_seconds_count", {}, 3),
    ("step_seconds_sum", {}, 0.5 + 0.25 + 2.0),
    ("step_seconds_count", {}, 3),
    # Between steps 1 and 2; before step 3 nothing ran.
    ("step_gap_seconds_sum", {}, 0.25),
    ("step_gap_seconds_count", {}, 1),
    ("step_tokens_sum", {}, 13 + 1 + 16),
    ("step_tokens_count", {}, 3),
    ("step_sequences_sum", {}, 1 + 1 + 3),
    ("step_sequences_count", {}, 3),
    ("device_memory_bytes", {"kind": "weights"}, 100),
    ("device_memory_bytes", {"kind": "kv_cache"}, 50),
    ("device_memory_bytes", {"kind": "graphs"}, 7),
    ("device_memory_bytes", {"kind": "total"}, 157),
    ("device_utilization_ratio", {}, 0.25),
    ("engine_info", {name: str(value) for name, value in INFO.items()}, 1),
)


def key_of(name: str, labels: dict[str, str]) -> str:
    return sample_key(f"pagedcore_{name}", {"model_name": "m", "engine": "0", **labels})


@functools.cache
def samples() -> dict[str, float]:
    return live_through_it().samples()


@pytest.mark.parametrize(("name", "labels", "value"), BY_HAND, ids=[key_of(name, labels) for name, labels, _ in BY_HAND])
def test_the_number_is_the_one_computed_by_hand(name: str, labels: dict[str, str], value: float) -> None:
    assert samples()[key_of(name, labels)] == pytest.approx(value, abs=1e-9)


def test_no_family_is_left_out() -> None:
    assert {family.name for name, _, _ in BY_HAND if (family := family_of(f"pagedcore_{name}"))} == set(FAMILIES)


def test_everything_else_is_zero() -> None:
    named = {key_of(name, labels) for name, labels, _ in BY_HAND}
    assert {key: value for key, value in samples().items() if key not in named and "_bucket{" not in key and value != 0} == {}


def test_each_observation_is_in_the_bucket_that_holds_it() -> None:
    text = metrics_text(live_through_it().registry)[0].decode()
    for name, below, at in (
        ("time_to_first_token_seconds", "0.5", "1.0"),
        ("time_in_queue_seconds", "0.25", "0.5"),
        ("request_latency_seconds", "2.5", "5.0"),
        ("inter_token_latency_seconds", "0.2", "0.5"),
        ("time_per_output_token_seconds", "0.2", "0.5"),
        ("step_seconds", "1.0", "2.0"),
        ("step_gap_seconds", "0.1", "0.5"),
        ("step_tokens", "8.0", "16.0"),
        ("step_sequences", "2.0", "4.0"),
        ("block_reuses", "1.0", "2.0"),
        ("block_lifetime_seconds", "5.0", "10.0"),
        ("block_idle_seconds", "0.1", "1.0"),
        ("block_reuse_gap_seconds", "1.0", "5.0"),
    ):
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"pagedcore_{name}_bucket"))
        under, up_to = (float(lines[f'pagedcore_{name}_bucket{{engine="0",le="{le}",model_name="m"}}']) for le in (below, at))
        assert up_to > under, name


def test_the_snapshot_of_the_library_has_the_same_numbers() -> None:
    stats = live_through_it().recorder.stats()
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens, stats.ideal_hit_tokens) == (40, 12, 24)
    assert stats.prefix_cache_hit_tokens_by_source == {"live": 4, "pool": 4, "host": 4}
    assert (stats.computed_prompt_tokens, stats.abandoned_prompt_tokens, stats.recomputed_tokens) == (23, 5, 4)
    assert (stats.page_lookups, stats.page_hits) == (9, 3)
    assert (stats.pool_acquired_reused_blocks, stats.pool_acquired_fresh_blocks) == (2, 10)
    assert (stats.hit_rate("page"), stats.hit_rate("prefix"), stats.hit_rate("pool")) == (3 / 9, 12 / 40, 2 / 12)
    assert stats.ideal_hit_rate == 24 / 40
    assert {reason: count for reason, count in stats.miss_blocks.items() if count} == {"cold": 3, "evicted": 1, "in_flight": 1, "hole": 1}
    assert stats.miss_penalty_tokens == {"evicted": 4, "in_flight": 4}
    assert stats.miss_penalty_seconds == {"evicted": 0.5, "in_flight": 0.5}
    assert stats.num_finished == {"completed": 1, "aborted": 1, "rejected": 1, "error": 1}
    assert stats.swapped_blocks == {"out": 2, "in": 1}
    assert (stats.prompt_tokens, stats.generation_tokens, stats.discarded_tokens, stats.num_preemptions) == (40, 2, 1, 1)
    assert (stats.num_running, stats.num_active_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (3, 16, 4, 44)
    assert (stats.kv_cache_usage, stats.kv_utilization, stats.device_memory_bytes) == (16 / 64, 48 / 64, 157)
