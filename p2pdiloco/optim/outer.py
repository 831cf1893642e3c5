"""The outer step: SGD with Nesterov momentum on a merged outer gradient.

DiLoCo (arXiv 2311.08105) and Decoupled DiLoCo (arXiv 2604.21428); the latter prints neither the
update nor its settings, so this is the usual form, which torch.optim.SGD(nesterov=True) computes as
well:

    momentum <- mu * momentum + delta
    anchor   <- anchor - lr * (delta + mu * momentum)

Every replica applies the same merged gradient by this function, and anchors and momentum stay equal
to the last bit on all machines. Therefore: float32 only, and one numpy ufunc per operation, each an
IEEE operation on single elements. No sums over elements, and no expression that a compiler could
contract to a fused multiply-add.

Where the periods of a run vary, learning rate and momentum follow the short ones
(`OuterStep.after`).
"""

from dataclasses import dataclass
from math import sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector."""

PARTS = 8
"""Periods are told apart by eighths of H: roots of that order are three square roots, which IEEE
defines to the last bit, as it does not powers."""


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The factors of an outer step; the defaults of `lookahead` and `weight` are those of the usual
    one.

        momentum <- mu * momentum + weight * delta
        anchor   <- anchor - lr * (delta + lookahead * momentum)
    """

    learning_rate: float
    momentum: float
    lookahead: float
    weight: float = 1.0

    @classmethod
    def usual(cls, learning_rate: float, momentum: float) -> "OuterStep":
        """Of a period of H inner steps."""
        return cls(learning_rate, momentum, lookahead=momentum)

    @classmethod
    def after(
        cls, learning_rate: float, momentum: float, period_steps: int, inner_steps: int
    ) -> "OuterStep":
        """Of a period of h = `period_steps`, where learning rate and momentum are meant for periods
        of H = `inner_steps`. Periods longer than H make the usual step.

        An outer gradient of h steps moves the anchor by lr / (1 - mu) times itself in the long run,
        and of what is still to come a merge leaves the part mu. Both should be so by inner steps,
        whatever the periods:

            mu_h = mu^(h/H)
            lr_h = lr * (1 - mu_h) / (1 - mu)
            weight = (mu_h / mu)^2,  lookahead = mu^2 / mu_h

        The last two keep the sum exact where periods alternate: what a gradient still has to move
        is then lr / (1 - mu) * mu^2 * momentum at all times, of which every merge delivers the part
        1 - mu_h. (AutoLoCo, arXiv 2609.36662, says that momentum and learning rate must follow H;
        its formulas we have not seen. These are ours.)

        For long periods the same formulas enlarge the step itself, and an outer gradient does not
        grow as its period does. On real training (`benchmarks.pacing_progress`, three seeds) they
        cost up to 0.11 nats per byte at a momentum of 0.8, and gained nothing at 0.3.
        """
        parts = max(1, (2 * PARTS * period_steps + inner_steps) // (2 * inner_steps))
        if parts >= PARTS or momentum == 0.0:
            return cls.usual(learning_rate, momentum)
        root, forgotten = sqrt(sqrt(sqrt(momentum))), 1.0
        for _ in range(parts):
            forgotten *= root
        ratio = forgotten / momentum
        return cls(
            learning_rate * (1.0 - forgotten) / (1.0 - momentum),
            forgotten,
            lookahead=momentum / ratio,
            weight=ratio * ratio,
        )


def nesterov_step(
    anchor: Vector, momentum: Vector, delta: Vector, learning_rate: float, momentum_factor: float
) -> tuple[Vector, Vector]:
    """The usual `outer_step`."""
    return outer_step(anchor, momentum, delta, OuterStep.usual(learning_rate, momentum_factor))


def outer_step(
    anchor: Vector, momentum: Vector, delta: Vector, step: OuterStep
) -> tuple[Vector, Vector]:
    """The new (anchor, momentum), float32[n] each; the arguments are left alone.

    `delta` is the outer gradient, old anchor minus new value, so a positive learning rate moves
    towards the learners.
    """
    assert anchor.dtype == momentum.dtype == delta.dtype == np.float32
    new_momentum = np.multiply(momentum, np.float32(step.momentum))
    fresh = delta if step.weight == 1.0 else np.multiply(delta, np.float32(step.weight))
    np.add(new_momentum, fresh, out=new_momentum)
    new_anchor = np.multiply(new_momentum, np.float32(step.lookahead))
    np.add(delta, new_anchor, out=new_anchor)
    np.multiply(new_anchor, np.float32(step.learning_rate), out=new_anchor)
    np.subtract(anchor, new_anchor, out=new_anchor)
    return new_anchor, new_momentum
