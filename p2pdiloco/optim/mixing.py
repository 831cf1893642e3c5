"""The factored round of gossip: two mixes and a private outer step, instead of one exact merge.

Factored Gossip DiLoCo (arXiv 2606.22768). In round t worker i holds its start theta_i and its own
outer momentum s_i:

    A_i   = Mix1({theta_j})_i        parameters at the start of the round, mixed while it trains
    D_i   = theta_i - local_i        after H inner steps
    D~_i  = Mix2({D_j})_i            outer gradients, mixed while it waits
    theta_i, s_i <- Nesterov(A_i, s_i, D~_i)          (outer.py)

Nothing is stale: each outer gradient is applied in the round that computed it, only the base that
it is added to is an average of starts. Either mix may be absent (the identity) and either may lose
partners. Momentum is never averaged: the paper saw periodic loss spikes from that. If Mix2 is the
exact average of all, every theta_i is the same, Mix1 has nothing to do, and the round is DiLoCo.

The paper's listing (its appendix A) was not at hand; this form follows from its text and its bound
on disagreement (`disagreement_limit`). How a failed partner counts is our choice: as the identity,
see `protocol/topology.py`.

Unlike replicas under a synchronizer, workers that gossip differ by design, so sums here need not be
the same to the last bit everywhere; those of one group of Mix2 are, since they add in one order.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pdiloco.optim.fragments import Fragment, TensorSlot
from p2pdiloco.optim.merge import MergeRule, merge
from p2pdiloco.optim.outer import nesterov_step
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.topology import PAIRS, Row, Topology, everybody

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector, in the order of a fragment's slots."""

SHALLOW_LAYERS = 2
"""Beside embedding and head, what the paper found Mix2 to need: 43 % of its model's parameters."""


# ---------------------------------------------------------------- which mixes


@dataclass(frozen=True, slots=True)
class Factors:
    """The two mixes of a strategy; None is the identity."""

    mix1: Topology | None
    mix2: Topology | None
    mix2_tensors: Literal["all", "ends"] = "all"
    """`ends`: embedding, head and the shallowest layers (`end_tensors`)."""


DILOCO = Factors(None, everybody)
"""The limit: everything blocks, all workers agree."""
GLOBAL_M1 = Factors(everybody, None)
"""Nothing blocks."""
GLOBAL_M1_LOCAL_M2 = Factors(everybody, PAIRS)
"""Only a small group blocks; the size of the paper's groups is not known to us."""
PAIRWISE = Factors(PAIRS, None)
"""Nothing blocks, and each round costs one partner's parameters, whatever the swarm's size."""


def disagreement_limit(
    rho1: float, rho2: float, learning_rate: float = 1.0, momentum_factor: float = 0.0
) -> float:
    """Mean squared distance of workers to their mean before the mixes, in drifts of one round, once
    it has settled; the drifts are independent noise.

    Plain steps of rate 1 give the paper's 1 + rho2 / (1 - rho1). The outer step is derived here:
    private momentum s remembers differences that Mix1 has taken out of the starts x, so with
    Nesterov they enter again. With S, C, V the settled means of |s|^2, <x, s>, |x|^2 about the mean
    and mixes as independent random projections (exact averages, random groups):

        S = rho2 / (1 - mu^2)        C = -lr ((1 + mu) rho2 + mu^3 S) / (1 - mu rho1)
        V = (lr^2 ((1 + mu)^2 rho2 + mu^4 S) - 2 lr mu^2 rho1 C) / (1 - rho1)
    """
    lr, mu = learning_rate, momentum_factor
    momentum = rho2 / (1 - mu**2)
    crossed = -lr * ((1 + mu) * rho2 + mu**3 * momentum) / (1 - mu * rho1)
    entering = lr**2 * ((1 + mu) ** 2 * rho2 + mu**4 * momentum)
    return 1 + (entering - 2 * lr * mu**2 * rho1 * crossed) / (1 - rho1)


# ---------------------------------------------------------------- the round


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker holds of a fragment between two rounds."""

    start: Vector
    momentum: Vector


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a partner and we know of each other's vector, after the codec of both ways."""

    theirs: Vector
    mine: Vector
    """Ours as the partner decoded it; without loss on the wire it is ours."""


def mix_parameters(own: Vector, row: Row, exchanged: Mapping[PeerId, Exchanged]) -> Vector:
    """Mix1: own + sum_j w_j (theirs_j - mine_j) over the partners whose exchange came about.

    Being a sum of differences it leaves parameters that agree as they are, to the last bit, turns a
    missing partner into the identity, and keeps the workers' sum under any codec, since what one
    end adds the other takes away.
    """
    mixed = own.copy()
    for partner, weight in row.partners.items():
        if partner in exchanged:
            link = exchanged[partner]
            mixed += np.float32(weight) * (link.theirs - link.mine)
    return mixed


def mix_gradients(
    me: PeerId, gradients: Mapping[PeerId, Vector], row: Row, fragment: Fragment, rule: MergeRule
) -> Vector:
    """Mix2: the merge of the outer gradients that are there, mine among them, by the row's weights.

    `mean` is the doubly stochastic mix of the paper. `rda` keeps the length of one worker's outer
    gradient instead (merge.py), so that it no longer keeps the workers' mean. Vectors add in the
    order of names: a group whose members all hold the same vectors gets the same bits.
    """
    row = row.without([peer for peer in row.partners if peer not in gradients])
    weights = {me: row.own, **row.partners}
    present = sorted(weights)
    return merge(
        [gradients[peer] for peer in present], [weights[peer] for peer in present], fragment, rule
    )


def finish_round(
    state: WorkerState,
    mixed_start: Vector,
    mixed_gradient: Vector,
    learning_rate: float,
    momentum_factor: float,
) -> WorkerState:
    """The outer step on the mixed start, with the worker's own momentum."""
    start, momentum = nesterov_step(
        mixed_start, state.momentum, mixed_gradient, learning_rate, momentum_factor
    )
    return WorkerState(start, momentum)


# ---------------------------------------------------------------- the same, without a wait


@dataclass(frozen=True, slots=True)
class Continuation:
    """What `finish_round` makes of a worker's local values, known before they are: without a Mix2
    the outer gradient is start - local, and Nesterov's step is then affine in `local`:

        theta' = A - lr (D + mu s')                     with s' = mu s + D,  D = theta - local
               = [A - lr (1 + mu) theta - lr mu^2 s]  +  lr (1 + mu) local
               =  base                                +  share       local

    So a learner that holds `base` goes on from theta' at the boundary where its round ends: it
    stands still for one multiplication, and no step is taken from a value that is then overwritten.
    """

    base: Vector
    share: float

    @classmethod
    def of(
        cls, state: WorkerState, mixed_start: Vector, learning_rate: float, momentum_factor: float
    ) -> "Continuation":
        lr, mu = np.float32(learning_rate), np.float32(momentum_factor)
        share = lr * (np.float32(1) + mu)
        base = mixed_start - share * state.start
        base -= lr * mu * mu * state.momentum
        return cls(base, float(share))

    def start(self, local: Vector) -> Vector:
        """theta', f32 [n]; the same bits wherever it is computed."""
        start = np.multiply(local, np.float32(self.share))
        return np.add(start, self.base, out=start)

    def finish(self, state: WorkerState, local: Vector, momentum_factor: float) -> WorkerState:
        """The state after the round that ended at `local`."""
        momentum = np.float32(momentum_factor) * state.momentum + (state.start - local)
        return WorkerState(self.start(local), momentum)


# ---------------------------------------------------------------- part of the tensors


def end_tensors(slots: Iterable[TensorSlot]) -> frozenset[str]:
    """Names of the tensors that Mix2 needs: embedding, untied head, the shallowest layers.

    `slots` are those of the whole model. A layer's tensors have its number as the first number
    between dots: `model.layers.0.mlp.up_proj.weight`.
    """
    slots = list(slots)
    numbers = sorted({n for slot in slots if (n := _layer(slot)) is not None})
    shallow = numbers[:SHALLOW_LAYERS]
    return frozenset(slot.name for slot in slots if slot.is_embedding or _layer(slot) in shallow)


def _layer(slot: TensorSlot) -> int | None:
    match = re.search(r"(?:^|\.)(\d+)\.", slot.name)
    return int(match[1]) if match and not slot.is_embedding else None


@dataclass(frozen=True, slots=True)
class Part:
    """Some tensors of a fragment as a vector of their own, which is what travels."""

    layout: Fragment
    spans: tuple[slice, ...]
    """Where the tensors lie in the whole fragment's vector."""

    def take(self, whole: Vector) -> Vector:
        """A copy of the part, f32 [layout.size]."""
        return np.concatenate([whole[span] for span in self.spans] or [whole[:0]])

    def put(self, whole: Vector, part: Vector) -> Vector:
        """`whole` with the part replaced; the arguments are left alone."""
        result = whole.copy()
        for slot, span in zip(self.layout.slots, self.spans, strict=True):
            result[span] = part[slot.span]
        return result


def part_of(fragment: Fragment, names: Collection[str]) -> Part:
    """The tensors of `fragment` that are among `names`; there may be none."""
    chosen = [slot for slot in fragment.slots if slot.name in names]
    return Part(Fragment(fragment.index, _laid_out(chosen)), tuple(slot.span for slot in chosen))


def _laid_out(slots: Sequence[TensorSlot]) -> tuple[TensorSlot, ...]:
    placed: list[TensorSlot] = []
    offset = 0
    for slot in slots:
        placed.append(TensorSlot(slot.name, slot.shape, offset, slot.is_embedding))
        offset += slot.size
    return tuple(placed)
