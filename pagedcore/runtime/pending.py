"""Steps that were handed to the device, and the results they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.core.step import StepPlan, StepResult
from pagedcore.runtime.logprobs import TokenLogprobs
from pagedcore.runtime.sampler import STATUS_MESSAGES, STATUS_NOT_FINITE, STATUS_OK, Samples
from pagedcore.runtime.transfer import HostCopy


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens of one row, on the device."""

    row: int
    num_top: int
    logprobs: TokenLogprobs


class FailedStep:
    """A step that raised before it reached the device."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class DeviceStep:
    """Owns the host copies of one step's output. Implements `pagedcore.core.step.PendingStep`."""

    def __init__(
        self,
        plan: StepPlan,
        sampled_rows: Sequence[int],
        samples: Samples | None,
        prompt_logprobs: Sequence[PromptLogprobs],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._sampled_rows = sampled_rows
        self._logprob_rows = samples.batch.logprobs if samples is not None else None
        self._grammar_rows = samples.batch.grammar if samples is not None else None
        self._prompt_parts = [(f"prompt_{index}", part.row, part.num_top) for index, part in enumerate(prompt_logprobs)]
        tensors: dict[str, Tensor] = {}
        if samples is not None:
            tensors |= {"token_ids": samples.token_ids, "status": samples.status}
            if samples.logprobs is not None:
                tensors |= samples.logprobs.tensors("sampled")
        for (name, _, _), part in zip(self._prompt_parts, prompt_logprobs, strict=True):
            tensors |= part.logprobs.tensors(name)
        self._copy = HostCopy(tensors, device)

    def result(self) -> StepResult:
        """See `PendingStep.result`."""
        tensors = self._copy.wait()
        result = StepResult(step_id=self._plan.step_id, sampled_token_ids=[])
        if self._sampled_rows:
            self._add_samples(result, tensors)
        for name, row, num_top in self._prompt_parts:
            logprobs = TokenLogprobs.from_tensors(name, tensors)
            if logprobs.values.isnan().any():
                result.row_errors.setdefault(row, STATUS_MESSAGES[STATUS_NOT_FINITE])
            result.prompt_logprobs.setdefault(row, []).extend(logprobs.dicts([num_top] * len(logprobs.ids)))
        return result

    def _add_samples(self, result: StepResult, tensors: dict[str, Tensor]) -> None:
        token_ids = tensors["token_ids"].tolist()
        token_of_row = dict(zip(self._sampled_rows, token_ids, strict=True))
        result.sampled_token_ids = [token_of_row[row] for row, samples in zip(self._plan.rows, self._plan.samples, strict=True) if samples]
        for row, status in zip(self._sampled_rows, tensors["status"].tolist(), strict=True):
            if status != STATUS_OK:
                result.row_errors[row] = STATUS_MESSAGES[status]
        if self._grammar_rows is not None:
            result.row_errors |= {self._sampled_rows[index]: reason for index, reason in self._grammar_rows.errors().items()}
            self._grammar_rows.advance(token_ids)
        if self._logprob_rows is not None:
            dicts = TokenLogprobs.from_tensors("sampled", tensors).dicts(self._logprob_rows.num_top)
            rows = [self._sampled_rows[index] for index in self._logprob_rows.indices]
            result.logprobs.update(zip(rows, dicts, strict=True))
