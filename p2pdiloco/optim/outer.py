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
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector."""


def nesterov_step(
    anchor: Vector, momentum: Vector, delta: Vector, learning_rate: float, momentum_factor: float
) -> tuple[Vector, Vector]:
    """The new (anchor, momentum), float32[n] each; the arguments are left alone.

    `delta` is the outer gradient, old anchor minus new value, so a positive learning rate moves
    towards the learners.
    """
    assert anchor.dtype == momentum.dtype == delta.dtype == np.float32
    lr, mu = np.float32(learning_rate), np.float32(momentum_factor)
    new_momentum = np.multiply(momentum, mu)
    np.add(new_momentum, delta, out=new_momentum)
    new_anchor = np.multiply(new_momentum, mu)
    np.add(delta, new_anchor, out=new_anchor)
    np.multiply(new_anchor, lr, out=new_anchor)
    np.subtract(anchor, new_anchor, out=new_anchor)
    return new_anchor, new_momentum
