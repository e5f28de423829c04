"""From a config to the parts of an engine: the one place where they are put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig, EnginePlan
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.device_meter import watch_device
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.errors import PagedCoreError
from pagedcore.grammar.grammars import Grammars
from pagedcore.metrics_compat.ledgers import ledger_for
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.tenancy.limits import TenantLimits
from pagedcore.tracing.tracer import Tracer

REMOTE_CODE_WARNING = (
    "trust_remote_code=True has no effect: code that comes with a model is never run, and the model is loaded by the code of pagedcore "
    "or refused. Leave the setting out."
)

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig, *, progress: Callable[[int, int], None] | None = None, make_recorder: Callable[..., Recorder] = Recorder
) -> EngineLoop:
    """Find the model, load it, size the pool, and make an engine that is ready to start.

    Raises `ModelSourceError` or `CheckpointError` for the model, `ConfigError` for settings that cannot work here.
    """
    return EngineLoop(build_parts(config, progress=progress, make_recorder=make_recorder))


def build_parts(
    config: EngineConfig, *, progress: Callable[[int, int], None] | None = None, make_recorder: Callable[..., Recorder] = Recorder
) -> EngineParts:
    """Find and load the model, size the pool, make scheduler, runner and recorder. Raises what each of them raises."""
    from pagedcore.models.source import resolve_model
    from pagedcore.runtime.build import build_runner

    if config.trust_remote_code:
        logger.warning(REMOTE_CODE_WARNING)
    model = resolve_model(config)
    runner, plan = build_runner(config, model.model_dir, model_name=model.name, tokenizer_dir=model.tokenizer_dir, progress=progress)
    grammars = model_grammars(plan)
    if grammars is not None:
        runner.follow_grammars(grammars)
    recorder = make_recorder(recorder_info(plan), ledger=ledger_for(config.metrics_compat))
    watch_device(recorder, _device_uuid(plan.device))
    try:
        tracer = Tracer(recorder, config)
    except PagedCoreError:
        runner.close()
        raise
    return EngineParts(
        plan=plan,
        info=model_info(plan),
        scheduler=Scheduler(scheduler_limits(plan)),
        runner=runner,
        recorder=recorder,
        tracer=tracer,
        grammars=grammars,
    )


def model_info(plan: EnginePlan) -> ModelInfo:
    """What fronts need to know, also in other processes."""
    return ModelInfo(
        model_names=plan.served_model_names,
        max_model_len=plan.max_model_len,
        created_s=int(time.time()),
        vocab_size=plan.vocab_size,
        eos_token_ids=plan.eos_token_ids,
        max_waiting_requests=plan.config.max_waiting_requests,
        seed=plan.config.seed,
    )


def model_grammars(plan: EnginePlan) -> Grammars | None:
    """What compiles grammars for a plan's model; None with skip_tokenizer_init."""
    if plan.config.skip_tokenizer_init:
        return None
    from pagedcore.text.tokenizer import load_tokenizer

    return Grammars(lambda: load_tokenizer(plan.tokenizer_dir).to_json(), plan.vocab_size, plan.eos_token_ids)


def scheduler_limits(plan: EnginePlan) -> SchedulerLimits:
    config = plan.config
    return SchedulerLimits(
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        num_host_blocks=plan.num_host_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        watermark_fraction=config.watermark_fraction,
        max_preemptions=config.max_preemptions,
        max_batch_wait_s=config.max_batch_wait_ms / 1000.0,
        max_waiting_requests=config.max_waiting_requests,
        num_in_flight_steps=2 if plan.overlap else 1,
        tenants=TenantLimits(
            max_running=config.max_running_per_tenant,
            max_waiting=config.max_waiting_per_tenant,
            cache_fraction=config.cache_fraction_per_tenant,
        ),
    )


def recorder_info(plan: EnginePlan) -> RecorderInfo:
    from pagedcore import __version__

    memory = plan.memory
    return RecorderInfo(
        model_name=plan.model_name,
        engine=plan.config.metrics_instance,
        version=__version__,
        backend=plan.attention_backend,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        kv_cache_dtype=plan.kv_cache_dtype,
        quantization=plan.quantization or "none",
        linear_backend=plan.linear_backend,
        dtype=plan.dtype,
        device=plan.device,
        device_memory_bytes={
            "weights": memory.weights_bytes,
            "kv_cache": memory.kv_cache_bytes,
            "graphs": memory.graphs_bytes,
            "activations": memory.activations_bytes,
        },
    )


def _device_uuid(device: str) -> str | None:
    """The name by which NVML knows a CUDA device, whatever hides or reorders devices in this process; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
