"""`pagedcore generate`: one prompt, its text, and one line about the cache."""

from __future__ import annotations

from pagedcore.config import EngineConfig
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams


def complete(config: EngineConfig, prompt: str, params: SamplingParams, *, is_raw: bool) -> RequestOutput:
    """Load, answer (through the chat template unless `is_raw`), close. Raises what the engine raises."""
    from pagedcore.async_engine import AsyncEngine

    engine = AsyncEngine(config)
    try:
        text = prompt if is_raw or engine.text is None else engine.text.render_chat([{"role": "user", "content": prompt}])
        *_, last = engine.generate_sync(text, params, add_special_tokens=is_raw)
        return last
    finally:
        engine.close_sync()


def cache_line(output: RequestOutput) -> str:
    """Where the prompt's tokens came from, how much was generated, and how fast."""
    prompt_tokens, new_tokens = len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)
    line = f"cache: {output.num_cached_tokens} of {prompt_tokens} prompt tokens"
    if output.cache is not None and output.cache.miss_blocks:
        line += " (missed blocks: " + ", ".join(f"{count} {reason}" for reason, count in output.cache.miss_blocks.items()) + ")"
    line += f" | {new_tokens} tokens generated"
    timings = output.timings
    if timings is not None and timings.finished_s is not None and timings.first_token_s is not None:
        total_s, first_s = timings.finished_s - timings.arrival_s, timings.first_token_s - timings.arrival_s
        line += f" in {total_s:.2f} s, the first after {1000 * first_s:.0f} ms"
    return line
