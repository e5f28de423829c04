"""Everything that is learnt from traffic, whether it is live or a trace."""

from __future__ import annotations

from pagedcore.advice.advice import Advice
from pagedcore.advice.block_stack import Found
from pagedcore.advice.costly_prefixes import CostlyPrefixes
from pagedcore.advice.divergence import DivergenceFinder
from pagedcore.advice.prompt import Prompt
from pagedcore.advice.reuse_sketch import MAX_TRACKED_BLOCKS, ReuseSketch
from pagedcore.advice.sentences import Findings, write_sentences


class TrafficStudy:
    """Owns the reuse sketch, the divergence finder and the costly prefixes of one engine or trace."""

    def __init__(self, block_size: int, num_blocks: int, *, num_host_blocks: int = 0, max_tracked_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self.sketch = ReuseSketch(block_size, num_blocks, num_host_blocks=num_host_blocks, max_tracked_blocks=max_tracked_blocks)
        self._has_host_tier = num_host_blocks > 0
        self.costly_prefixes = CostlyPrefixes()
        self._divergence = DivergenceFinder()
        self._shared_tails = [0, 0]  # tokens, prompts

    def admit(self, prompt: Prompt, *, now: float, tokens_a_tick: float = 1.0) -> Found:
        """A prompt was looked up and got its blocks. `now` is in ticks, see `ReuseSketch`."""
        found = self.sketch.admit(prompt, now=now, tokens_a_tick=tokens_a_tick)
        if prompt.is_counted:
            self._divergence.examine(prompt.domain, prompt.tenant, prompt.token_ids)
        return found

    def note_shared_tail(self, num_tokens: int) -> None:
        """A shared prefix reached so many tokens into the first block that was not shared."""
        self._shared_tails[0] += num_tokens
        self._shared_tails[1] += 1

    def advice(
        self,
        *,
        hit_rate: float | None,
        ideal_hit_rate: float | None,
        window_s: float,
        is_caching_on: bool = True,
        num_preemptions: int = 0,
    ) -> Advice:
        """What has been learnt so far, beside the rates that were measured."""
        curve = self.sketch.curve()
        num_tokens, num_prompts = self._shared_tails
        findings = Findings(
            curve=curve,
            block_size=self.sketch.block_size,
            hit_rate=hit_rate,
            ideal_hit_rate=ideal_hit_rate,
            num_lookups=self.sketch.num_lookups,
            is_caching_on=is_caching_on,
            has_host_tier=self._has_host_tier,
            num_preemptions=num_preemptions,
            divergences=self._divergence.divergences(),
            shared_tail_tokens=num_tokens / num_prompts if num_prompts else None,
        )
        return Advice(
            sentences=write_sentences(findings),
            hit_rate=hit_rate,
            ideal_hit_rate=ideal_hit_rate,
            curve=curve,
            costliest_prefixes=self.costly_prefixes.costliest(),
            num_lookups=self.sketch.num_lookups,
            window_s=window_s,
        )
