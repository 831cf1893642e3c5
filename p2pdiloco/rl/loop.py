"""A learner of episodes: one AdamW step of GRPO for each part of its shares.

It makes no step without a part; who drives it looks at `shares.has_part` first.

Where the spec gives a KL term a weight, the reference that it holds the policy to is a version of
the model, another one every `reference_steps` merges: GRPO's algorithm, too, goes on from a new
reference in each of its outer iterations. It is the first of these versions that the learner
stands on, so a learner that comes in between holds to a younger one than the others.
"""

import copy
from collections.abc import Sequence

import torch

from p2pdiloco.learn.local_model import LocalModel, StepResult
from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.rl.losses import Totals
from p2pdiloco.rl.packing import batches, totals_of
from p2pdiloco.rl.rules import limits_of, loss_rules_of, rl_of
from p2pdiloco.rl.shares import Part, Shares
from p2pdiloco.rl.step import Gradient, accumulate
from p2pdiloco.spec import RunSpec

BATCH_TOKENS_MAX = 8192
"""Of one forward pass: what its logits take is this times the vocabulary."""


def shares_of(spec: RunSpec) -> Shares:
    """None yet."""
    rl = rl_of(spec)
    return Shares(spec.sync.inner_steps, rl.group_size, rl.lag_max, rl.variant)


class RlLoop(LocalModel):
    """Dropout is off, as it was when the episodes were rolled out."""

    def __init__(
        self,
        model: torch.nn.Module,
        shares: Shares,
        spec: RunSpec,
        fragments: Sequence[Fragment],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(model, spec.inner, fragments, device)
        self.model.eval()
        self._shares = shares
        self._temperature = rl_of(spec).temperature
        self._loss_rules = loss_rules_of(spec)
        self._reference_steps = rl_of(spec).reference_steps
        self._reference: torch.nn.Module | None = None
        self._period: int | None = None
        """Of versions, in which the reference is."""
        limits = limits_of(spec)
        self._num_tokens_max = min(limits.turns_max * limits.answer_tokens_max, limits.tokens_max)

    def step(self) -> StepResult:
        """Of the next part. One without differences moves nothing, and is counted; one whose
        gradient is not finite is skipped, and counted without its tokens: there is no other part
        in its place."""
        part = self._shares.take()
        if self._loss_rules.kl_weight and not self.steps[0]:
            self._take_reference()
        self._begin_step()
        if not part.chosen:
            self._count(part.num_tokens)
            self._shares.learnt(part, None)
            return StepResult(0.0, part.num_tokens)
        gradient = self._accumulate(part, totals_of(part.chosen, self._num_tokens_max))
        num_tokens = self._end_step(part.num_tokens)
        if not num_tokens:
            self._count(0)
        self._shares.learnt(part, gradient if num_tokens else None)
        return StepResult(gradient.loss, num_tokens)

    def _accumulate(self, part: Part, totals: Totals) -> Gradient:
        parts = batches(part.chosen, BATCH_TOKENS_MAX)
        return accumulate(
            self.model, parts, totals, self._loss_rules, self._temperature, self._reference
        )

    def _take_reference(self) -> None:
        """The parameters are those of a version, which no step has changed yet."""
        version = self._shares.version
        assert version is not None, "there was a part"
        if self._period != version // self._reference_steps:
            self._period = version // self._reference_steps
            self._reference = None  # first: there is memory for one
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
