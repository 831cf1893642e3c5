"""How fast the engine is, for whoever places work on it: measured on real work, drafts included.

The cost table (costs.py) says what a step of so many tokens takes. What a sequence gains from its
drafts depends on the texts, and is learnt from the steps that decode: how much longer or shorter a
token took than in a step without drafts.
"""

from p2pdiloco.rollout.costs import CostTable

_NEWEST = 0.1
"""Weight of a new measurement."""
_RATIO_MAX = 2.0
"""A token counts as at most so many times as long as without drafts: machines have hiccups."""


class Pace:
    """By the clock of the engine. Empty until `costs` are measured."""

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self._ratios: dict[int, float] = {}
        """By measured batch size: what a token takes, in those of a step without drafts."""
        self._prefilled = self._prefill_s = 0.0
        """Prompt tokens and what they took; older ones fade."""

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts, and nothing else."""
        self._prefilled += _NEWEST * (num_tokens - self._prefilled)
        self._prefill_s += _NEWEST * (seconds - self._prefill_s)

    def decoded(self, batch: int, num_tokens: int, seconds: float) -> None:
        """A step of so many sequences committed so many tokens of theirs."""
        if not self._costs.batches:
            return
        ratio = seconds * batch / num_tokens / self._costs.seconds(batch, batch)
        nearest = min(self._costs.batches, key=lambda known: abs(known - batch))
        before = self._ratios.get(nearest, 1.0)
        self._ratios[nearest] = before + _NEWEST * (min(ratio, _RATIO_MAX) - before)

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 before the first."""
        return self._prefilled / self._prefill_s if self._prefill_s else 0.0

    @property
    def token_s(self) -> tuple[tuple[int, float], ...]:
        """(sequences at once, seconds per token of each of them), by growing number."""
        return tuple(
            (batch, self._costs.seconds(batch, batch) * self._ratios.get(batch, 1.0))
            for batch in self._costs.batches
        )
