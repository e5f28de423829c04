"""What host memory for KV blocks promises, as functions of a device: run by the CPU tests and by the CUDA tests."""

from __future__ import annotations

import random

import torch

from pagedcore.core.events import Preempted
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.host_tier.swapped import Swapped
from pagedcore.swap.host_blocks import HostBlocks
from support.core_builders import Driver, make_limits
from support.runner_driver import GREEDY, generate_alone, make_runner, prompts
from support.tiny_model import TinyModel

BLOCK_SIZE = 8


def make_cache(dtype: torch.dtype, device: str, *, num_blocks: int = 40, head_dim: int = 16) -> torch.Tensor:
    """A pool of random bytes, NaNs of any kind among them: [3 layers, num_blocks, 8, 4, head_dim]."""
    shape = (3, num_blocks, BLOCK_SIZE, 4, head_dim)
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(0, 256, (*shape[:-1], head_dim * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return content.view(dtype).to(device)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8).cpu()


@torch.inference_mode()
def check_blocks_come_back_bit_for_bit(device: str, dtype: torch.dtype, *, head_dim: int = 16) -> None:
    """Through scattered host blocks, to the same blocks and to others; whatever is not named stays as it is."""
    cache = make_cache(dtype, device, head_dim=head_dim)
    before = as_bytes(cache).clone()
    host = HostBlocks(cache, 30)
    rng = random.Random(0)
    blocks, host_blocks = rng.sample(range(20), 17), rng.sample(range(30), 17)
    host.copy_out(list(zip(blocks, host_blocks, strict=True)))
    cache.view(torch.uint8)[:, :20] = 0
    targets = rng.sample(range(20), 17)
    host.copy_in(list(zip(targets, host_blocks, strict=True)))
    after = as_bytes(cache)
    host.close()
    assert torch.equal(after[:, targets], before[:, blocks])
    assert torch.equal(after[:, 20:], before[:, 20:])
    untouched = sorted(set(range(20)) - set(targets))
    assert not after[:, untouched].any()


def check_a_plan_copies_out_then_in_then_writes(device: str) -> None:
    """One step copies out two blocks, fills one of them from the other's host block, and computes a prompt into the other one."""
    model = TinyModel(device=device)
    runner = make_runner(model, num_blocks=8)
    runner.keep_host_blocks(2)
    cache = runner._cache.data
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
    before = as_bytes(cache).clone()
    (prompt,) = prompts(BLOCK_SIZE)
    row = AdmittedRow(row=0, request_id="r", token_ids=prompt, num_prompt_tokens=BLOCK_SIZE, block_ids=[5], params=GREEDY)
    plan = StepPlan(
        step_id=0,
        rows=[0],
        num_tokens=[BLOCK_SIZE],
        start_positions=[0],
        samples=[True],
        admitted=[row],
        total_num_tokens=BLOCK_SIZE,
        copies_out=[(3, 1), (5, 0)],
        copies_in=[(3, 0), (6, 1)],
    )
    result = runner.submit(plan).result()
    after = as_bytes(cache)
    runner.close()
    assert torch.equal(after[:, [3, 6]], before[:, [5, 3]])
    assert result.sampled_token_ids == generate_alone(model, prompt, 1)


def run_requests(model: TinyModel, *, num_blocks: int, num_host_blocks: int, num_in_flight_steps: int) -> Driver:
    """Four long conversations at a time, each asked twice, in a pool that holds about two; the core drives the real runner."""
    limits = make_limits(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_host_blocks=num_host_blocks,
        num_in_flight_steps=num_in_flight_steps,
    )
    runner = make_runner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=4, max_model_len=96)
    runner.keep_host_blocks(num_host_blocks)
    driver = Driver(Scheduler(limits), runner)  # type: ignore[arg-type]
    for turn in range(2):
        for index, prompt in enumerate(conversations()):
            driver.add(f"r{index}.{turn}", prompt, max_tokens=24, temperature=0.0)
        driver.run()
    runner.close()
    return driver


def conversations() -> list[list[int]]:
    return prompts(33, 41, 37, 50, 29, 45)


def check_outputs_with_host_memory_equal_those_without(device: str, num_in_flight_steps: int) -> None:
    """And blocks of finished requests and of preempted ones were copied both ways."""
    model = TinyModel(device=device)
    alone = [generate_alone(model, prompt, 24) for prompt in conversations()]
    driver = run_requests(model, num_blocks=20, num_host_blocks=80, num_in_flight_steps=num_in_flight_steps)
    for turn in range(2):
        assert [driver.tokens[f"r{index}.{turn}"] for index in range(len(alone))] == alone
    assert sum(report.cache.host_tokens for report in driver.last.values() if report.cache is not None) > 100
    assert driver.events_of(Preempted)
    assert {event.direction for event in driver.events_of(Swapped)} == {"out", "in"}
