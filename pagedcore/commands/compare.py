"""`pagedcore compare`: the A/B test to run before a quantized model goes live."""

from __future__ import annotations

from pathlib import Path

from pagedcore.commands.comparison import Comparison, ModelReport, perplexity
from pagedcore.commands.scoring import score_text
from pagedcore.commands.side import Side, encode_text, open_side, window_size
from pagedcore.commands.trial import Traffic, TrialResult, make_trial, run_trial
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.models.progress import Progress


def compare_models(
    a: EngineConfig,
    b: EngineConfig,
    text: str,
    *,
    window: int | None = None,
    max_text_tokens: int | None = None,
    traffic: Traffic | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Quality on a text, sizes, and speed on prompts cut from it, of two models; A is the reference.

    The text is read as one prompt would be, special tokens included, and cut into windows of `window` tokens (None is 1,024, or
    what the smaller model holds). Each window is scored from its start with an empty cache; its first token is not scored. Both
    models are in memory while the text is scored; then one engine runs after the other. `progress(what, done, total)` may be
    called from other threads.

    Raises `ConfigError` for models that cannot be compared, `InvalidRequestError` for a text or traffic with nothing in it,
    and what loading and running raise.
    """
    report = progress or _silence
    side_a, side_b = open_side("A", a, report), open_side("B", b, report)
    token_ids = encode_text(side_a, side_b, text, max_text_tokens)
    window_tokens = window_size(side_a, side_b, window)
    trial = make_trial(token_ids, traffic, side_a.tokenizer, min(side_a.max_model_len, side_b.max_model_len))
    scores = score_text(side_a, side_b, token_ids, window_tokens, report)
    run_a, run_b = (run_trial(side.label, side.config, trial, report) for side in (side_a, side_b))
    agreement = scores.agreement
    return Comparison(
        a=_model_report(side_a, run_a, agreement.mean_nll_a_nats, scores.weight_bytes_a),
        b=_model_report(side_b, run_b, agreement.mean_nll_b_nats, scores.weight_bytes_b),
        agreement=agreement,
        text=scores.scope,
        speed=trial.speed_scope(),
        traffic=trial.traffic_scope(),
    )


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The text file {str(path)!r} cannot be read: {reason}; check --text.") from error


def _model_report(side: Side, run: TrialResult, mean_nll_nats: float, weight_bytes: int) -> ModelReport:
    return ModelReport(
        model=side.name,
        quantization=run.plan.quantization,
        linear_backend=run.plan.linear_backend,
        device=run.plan.device,
        dtype=run.plan.dtype,
        perplexity=perplexity(mean_nll_nats),
        checkpoint_bytes=side.checkpoint_bytes,
        weight_bytes=weight_bytes,
        output_tokens_per_s=run.median_round.output_tokens_per_s,
        slowest_output_tokens_per_s=run.slowest_round.output_tokens_per_s,
        fastest_output_tokens_per_s=run.fastest_round.output_tokens_per_s,
        first_token_p50_s=run.median_round.first_token_p50_s,
        traffic=run.traffic,
    )


def _silence(what: str, done: int, total: int) -> None:
    pass
