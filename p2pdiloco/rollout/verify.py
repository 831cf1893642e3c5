"""Tokens that do not depend on how they were computed, and drafts that do not change them.

The rule of sampling.py is a function of the canonical logits z: those of a plain float64 pass over
the sequence alone. The engine computes float32 logits in whatever batch there is. As long as these
are within `margin` of z, a token that `decide` calls certain is that of z, and for one that it does
not call certain the `Referee` computes z. So the tokens are those of z, in any batch, with any
drafts, chunks, reused prefixes, on any machine.

A draft token is kept if it is the token that the rule gives at its place; the first that is not is
replaced by the one that the rule gives. Speculation cannot change a token, only save passes.

Where this ends. The margin is measured, not proven: `SAFETY` times the largest error seen, and each
verdict of the referee measures it again (`num_exceeded` counts errors beyond the margin then in
use: should one occur, an earlier token may have been decided wrongly). Two machines agree on z up
to about 1e-6, because transformers normalizes in float32, so at that rate per token their verdicts
may differ. In a mixture of experts a router near a tie moves logits by more than any margin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from p2pdiloco.rollout.packed import num_positions
from p2pdiloco.rollout.request import Running
from p2pdiloco.rollout.sampling import Choice, Sampling, decide, noise_key

SAFETY = 8.0
"""Margin per largest error seen. Errors of thousands of logits have been looked at by then; among
those of a whole run one may be some times larger."""
_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Position:
    """One place in a sequence that needs a token."""

    sampling: Sampling
    key: int
    """`noise_key` of the place."""
    prefix: Callable[[], Sequence[int]]
    """All tokens before the place."""

    @classmethod
    def after(cls, running: Running, draft: Sequence[int] = ()) -> "Position":
        """The place that follows a sequence, or a draft at its end."""
        request = running.request
        key = noise_key(request.sampling.seed, request.trajectory, len(running.tokens) + len(draft))
        return cls(request.sampling, key, lambda: [*running.tokens, *draft])


class Referee:
    """Decides what float32 leaves open, and keeps the margin honest."""

    def __init__(
        self,
        model: PreTrainedModel,
        rounded_logits: Callable[[Sequence[int]], Tensor] | None = None,
    ) -> None:
        """`rounded_logits` gives those of a sequence alone as the engine computes them, which may
        be otherwise than by a plain pass: [T, V], or of fewer places at its end.
        """
        self._model = model
        self._rounded_logits = rounded_logits or partial(plain_logits, model)
        self.margin = 0.0
        """In logits."""
        self.num_verdicts = 0
        self.num_exceeded = 0
        self.probe()

    def probe(self) -> None:
        """Widens the margin to what the present weights need. Call it when weights have changed."""
        vocabulary: int = self._model.config.vocab_size
        num_tokens = min(_PROBE_TOKENS, num_positions(self._model) - 1)
        tokens = [i * 7919 % vocabulary for i in range(num_tokens)]
        rounded_NV = self._rounded_logits(tokens)
        exact_NV = canonical_logits(self._model, tokens, num_last=len(rounded_NV))
        self._learn((exact_NV - rounded_NV).abs().max().item())

    def verdict(self, position: Position, rounded_V: Tensor) -> Choice:
        """The choice of the canonical logits. `rounded_V` are those that left it open."""
        exact_V = canonical_logits(self._model, position.prefix(), num_last=1)[0]
        error = (exact_V - rounded_V).abs().max().item()
        self.num_verdicts += 1
        self.num_exceeded += error > self.margin
        self._learn(error)
        return decide(exact_V[None], [position.sampling], [position.key], margin=0.0)[0]

    def _learn(self, error: float) -> None:
        self.margin = max(self.margin, SAFETY * error)


def settle(
    draft: Sequence[int],
    choices: Sequence[Choice],
    verdict: Callable[[int], Choice],
) -> list[Choice]:
    """The tokens to commit: those of the draft that the rule confirms, and the next one.

    `choices` has one more entry than the draft; `choices[i]` holds if all of `draft[:i]` does.
    `verdict(i)` is the referee's choice there.
    """
    settled: list[Choice] = []
    for index, choice in enumerate(choices):
        settled.append(choice if choice.certain else verdict(index))
        if index == len(draft) or settled[-1].token != draft[index]:
            break
    return settled


def canonical_logits(model: PreTrainedModel, tokens: Sequence[int], num_last: int = 0) -> Tensor:
    """Float64 logits of a pass over these tokens alone, [T, V], or those of the last tokens.

    The float64 weights live for the call only.
    """
    weights = {name: p.double() for name, p in model.named_parameters()}
    inputs = {**_inputs(model, tokens), "logits_to_keep": num_last}
    logits: Tensor = functional_call(model, weights, (), inputs).logits[0]
    return logits


def plain_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of a pass over these tokens alone, in the precision of the weights."""
    logits: Tensor = model(**_inputs(model, tokens)).logits[0]
    return logits


def _inputs(model: PreTrainedModel, tokens: Sequence[int]) -> dict[str, object]:
    device = next(model.parameters()).device
    return {"input_ids": torch.tensor([list(tokens)], device=device), "use_cache": False}
