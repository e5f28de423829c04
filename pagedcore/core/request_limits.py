"""Which requests can be served at all."""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.core.block_hash import MAX_TOKEN_ID
from pagedcore.core.events import RejectReason
from pagedcore.core.limits import SchedulerLimits
from pagedcore.errors import InvalidRequestError, PoolTooSmallError, PromptTooLongError, QueueFullError, RequestError, TenantQuotaError


def check_size(limits: SchedulerLimits, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """The most tokens, prompt and output, that the request may have.

    Raises `InvalidRequestError` for an empty prompt, `PromptTooLongError`, `PoolTooSmallError`.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError("The prompt is empty (0 tokens) and must have at least 1 token.", param="prompt")
    total = _total_tokens(limits, num_prompt_tokens, max_tokens)
    num_blocks = limits.blocks_for(total - 1)  # the last token is sampled and never computed
    if num_blocks > limits.num_blocks:
        raise PoolTooSmallError(
            f"Prompt ({num_prompt_tokens} tokens) and output ({total - num_prompt_tokens}) need {num_blocks} KV blocks of "
            f"{limits.block_size} tokens, and the pool has {limits.num_blocks}; lower max_tokens, or give the pool more memory "
            "(num_kv_blocks, gpu_memory_utilization).",
            param="max_tokens",
        )
    limits.tenants.check_blocks(num_blocks, limits.num_blocks)
    return total


def check_token_ids(token_ids: Sequence[int]) -> None:
    """Raises `InvalidRequestError` for ids that are no int32."""
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high > MAX_TOKEN_ID:
        raise InvalidRequestError(
            f"prompt_token_ids holds {low if low < 0 else high} and must hold ids between 0 and {MAX_TOKEN_ID}.", param="prompt"
        )


def check_priority(limits: SchedulerLimits, priority: int) -> None:
    """Raises `InvalidRequestError` for a priority that the policy would ignore."""
    if priority != 0 and limits.scheduling_policy == "fcfs":
        raise InvalidRequestError(
            f"priority is {priority} and scheduling_policy is 'fcfs', which serves in order of arrival; "
            "leave priority at 0, or start the engine with scheduling_policy='priority'.",
            param="priority",
        )


def check_queue(limits: SchedulerLimits, num_waiting: int) -> None:
    """Raises `QueueFullError` when one more may not wait."""
    if limits.max_waiting_requests is not None and num_waiting >= limits.max_waiting_requests:
        raise QueueFullError(
            f"{num_waiting} requests wait and max_waiting_requests is {limits.max_waiting_requests}; "
            "try again later, or raise max_waiting_requests."
        )


def reject_reason(error: RequestError) -> RejectReason:
    """The label of a refusal."""
    if isinstance(error, PromptTooLongError):
        return "too_long"
    if isinstance(error, PoolTooSmallError):
        return "pool_too_small"
    if isinstance(error, TenantQuotaError):
        return "tenant_quota"
    return "queue_full" if isinstance(error, QueueFullError) else "invalid"


def _total_tokens(limits: SchedulerLimits, num_prompt_tokens: int, max_tokens: int | None) -> int:
    limit = limits.max_model_len
    if num_prompt_tokens >= limit:
        # A text that is far too long is not read to its end.
        raise PromptTooLongError(
            f"The prompt has {num_prompt_tokens} tokens{' or more' * (num_prompt_tokens > limit)} and max_model_len is {limit}, "
            "which leaves no room for output; shorten the prompt or raise max_model_len.",
            param="prompt",
        )
    if max_tokens is None:
        return limit
    if num_prompt_tokens + max_tokens > limit:
        raise PromptTooLongError(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together {num_prompt_tokens + max_tokens}, "
            f"and max_model_len is {limit}; shorten the prompt, lower max_tokens or raise max_model_len.",
            param="max_tokens",
        )
    return num_prompt_tokens + max_tokens
