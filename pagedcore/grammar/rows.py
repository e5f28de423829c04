"""Device rows whose next token must follow a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcore.core.step import StepPlan
from pagedcore.grammar.grammars import Grammars
from pagedcore.grammar.matcher import Matcher


@dataclass(frozen=True, slots=True)
class MatchedRows:
    """The rows of a step that follow a grammar. They keep their matchers when the rows go to others."""

    grammars: Grammars
    indices: list[int]
    """Of the rows among those of the step."""
    matchers: list[Matcher]

    def masks(self) -> bytearray:
        """One mask after another, each one bit a token in whole 32-bit words. Waits for masks that are still being computed."""
        return bytearray().join(matcher.mask() for matcher in self.matchers)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that were drawn, one a row of the step; the masks that follow are being computed from now on."""
        self.grammars.advance(self.matchers, [token_ids[index] for index in self.indices])

    def errors(self) -> dict[int, str]:
        """Index of a row -> why its grammar allows nothing."""
        pairs = zip(self.indices, self.matchers, strict=True)
        return {index: f"every token is masked by its grammar: {matcher.error}" for index, matcher in pairs if matcher.error is not None}


class RowMatchers:
    """Owns the matcher of each row in use whose output follows a grammar."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's released and admitted rows. What an admitted one has generated before, its matcher has seen."""
        for row in plan.released_rows:
            self._matchers.pop(row, None)
        for request in plan.admitted:
            params = request.params.structured_outputs
            if params is not None:
                self._matchers[request.row] = self._grammars.open(params, request.token_ids[request.num_prompt_tokens :])

    def among(self, rows: Sequence[int]) -> MatchedRows | None:
        """Those of a step; None where there is none."""
        found = [(index, self._matchers[row]) for index, row in enumerate(rows) if row in self._matchers]
        return MatchedRows(self._grammars, [index for index, _ in found], [matcher for _, matcher in found]) if found else None
