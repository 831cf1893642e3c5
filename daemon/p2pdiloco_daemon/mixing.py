"""What a node that gossips computes: vectors for its partners, theirs, and the outer step on both.

Arithmetic runs in the worker thread, and with it what follows from it alone: what partners were
sent, outer gradients, distances. Swaps and what partners sent us change on the event loop. Who
mixes with whom and what counts is the core's business (`p2pdiloco.protocol.gossip`).

Partners that come back are sent the difference to what they hold of ours (`compress/difference`),
at the cost of three vectors per partner; that pays where the topology names the same few again and
again. The `RETURNING_MAX` newest are remembered, and none where partners are drawn anew. A whole
vector travels in 8 bits at least: in 4 it would be a tenth of its length off.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TypeAlias, TypeVar

import numpy as np

from p2pdiloco.compress.codec import decode, encode, max_encoded_bytes
from p2pdiloco.compress.difference import Sent, decode_difference
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.optim.merge import MergeRule, norm
from p2pdiloco.optim.mixing import (
    Continuation,
    Exchanged,
    Part,
    WorkerState,
    finish_round,
    mix_gradients,
    mix_parameters,
)
from p2pdiloco.protocol.actions import FinishRound
from p2pdiloco.protocol.naming import MixId, PeerId
from p2pdiloco.protocol.topology import Row
from p2pdiloco_bootstrap.shelf import MixVector
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.replica import (
    Buffer,
    FragmentState,
    StaleBaseError,
    Vector,
    make_finite_state,
    require_sound,
)

T = TypeVar("T")

RETURNING_MAX = 4
"""Partners per fragment to whom differences are sent: 48 bytes per parameter for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSettings:
    """Of the run spec, what the arithmetic needs."""

    me: PeerId
    learning_rate: float
    momentum: float
    start_wire: WireFormat
    outer_wire: WireFormat
    merge_rule: MergeRule
    outer_parts: tuple[Part, ...]
    """Of each fragment, the tensors that Mix2 is for."""
    partners_return: bool
    """Whether the topology names the same partners again and again."""


Coded: TypeAlias = tuple[MixVector, Vector]
"""What is sent, and what the partner holds after that."""


@dataclass(slots=True)
class _Swap:
    """One vector of ours, and those of the partners that it is swapped with."""

    mix: MixId
    own: Vector
    partners: tuple[PeerId, ...]
    coded: dict[PeerId, tuple[int | None, Coded]] = field(default_factory=dict)
    """What it said it held when it asked last, and what it got for that."""
    arrived: dict[PeerId, Vector] = field(default_factory=dict)
    """Ours as each partner has it."""
    theirs: dict[PeerId, Vector] = field(default_factory=dict)

    def exchanged(self) -> dict[PeerId, Exchanged]:
        """A partner may have ours from before this process was started: then, but for what the
        codec lost, it has what we hold.
        """
        return {
            peer: Exchanged(theirs, self.arrived.get(peer, self.own))
            for peer, theirs in self.theirs.items()
        }


class Mixing:
    """`distance` is how far the partners of the newest exchanges were from this node: the Euclidean
    distance of the whole model, mean square over partners, and the same as a share of its length.
    """

    def __init__(self, holdings: Holdings, settings: MixSettings) -> None:
        self._holdings = holdings
        self._replica = holdings.replica
        self._settings = settings
        self._swaps: dict[tuple[int, str], _Swap] = {}
        self._sent: list[OrderedDict[PeerId, Sent]] = [
            OrderedDict() for _ in self._replica.fragments
        ]
        self._held: list[OrderedDict[PeerId, tuple[int, Vector]]] = [
            OrderedDict() for _ in self._replica.fragments
        ]
        self._gradients: dict[int, Vector] = {}
        """Our whole outer gradients, of rounds that were cut."""
        self._distances: dict[int, tuple[float, float]] = {}
        """By fragment: squared distance to partners, mean, and own squared length."""

    @property
    def distance(self) -> tuple[float, float] | None:
        if not self._distances:
            return None
        apart, length = map(sum, zip(*list(self._distances.values()), strict=True))
        return sqrt(apart), sqrt(apart / length) if length else 0.0

    # ---------------------------------------------------------------- swapping

    def open(self, mix: MixId, partners: Sequence[PeerId]) -> None:
        state = self._replica.state(mix.fragment)
        assert state and state.version == mix.round, mix
        self._swaps[mix.fragment, "start"] = _Swap(mix, state.anchor, tuple(partners))
        self._swaps.pop((mix.fragment, "outer"), None)

    async def vector_for(self, peer: PeerId, mix: MixId, held: int | None) -> MixVector | None:
        """Ours, for a partner of that round; None for anybody else."""
        swap = self._swap(mix)
        if swap is None or peer not in swap.partners:
            return None
        to, base = (peer, held) if mix.part == "start" else (self._settings.me, None)
        if to not in swap.coded or swap.coded[to][0] != base:
            swap.coded[to] = base, await self._holdings.compute(self._encode, swap, to, base)
        vector, swap.arrived[peer] = swap.coded[to][1]
        return vector

    def held(self, mix: MixId, peer: PeerId) -> tuple[int, Vector] | None:
        """The newest round of which we hold the partner's start, and it."""
        return self._held[mix.fragment].get(peer) if mix.part == "start" else None

    def bytes_max(self, mix: MixId) -> int:
        size = self._replica.fragments[mix.fragment].size
        wires: tuple[WireFormat, ...] = (
            "int8",
            self._settings.start_wire,
            self._settings.outer_wire,
        )
        return max(max_encoded_bytes(size, wire) for wire in wires)

    async def take(
        self, mix: MixId, peer: PeerId, vector: MixVector, held: tuple[int, Vector] | None
    ) -> None:
        """Decodes and checks a partner's vector; PayloadError if it is not what it should be.
        `held` is what it was told that we hold: it may be kept no more.
        """
        p, base = mix.fragment, held[1] if held and vector.held is not None else None
        theirs = await self._holdings.compute(self._decode, mix, vector.payload, base)
        if swap := self._swap(mix):
            swap.theirs[peer] = theirs
        if mix.part == "start" and self._settings.partners_return:
            _remember(self._held[p], peer, (mix.round, theirs))

    def _swap(self, mix: MixId) -> _Swap | None:
        swap = self._swaps.get((mix.fragment, mix.part))
        return swap if swap and swap.mix == mix else None

    def _offered(self, mix: MixId) -> _Swap:
        """StaleBaseError if the state that it was of has been replaced meanwhile."""
        if swap := self._swap(mix):
            return swap
        raise StaleBaseError(f"the values of {mix} are kept no more")

    def _encode(self, swap: _Swap, peer: PeerId, held: int | None) -> Coded:
        mix, settings = swap.mix, self._settings
        if mix.part == "outer":
            payload = encode(swap.own, settings.outer_wire)
            return MixVector(None, payload), swap.own
        if mix.part == "local" or not settings.partners_return:
            payload = encode(swap.own, self._wire(None))
            return MixVector(None, payload), decode(payload, swap.own.size, self._wire(None))
        sent = self._sent[mix.fragment].get(peer)
        if sent is None:
            sent = Sent(np.zeros_like(swap.own))
            _remember(self._sent[mix.fragment], peer, sent)
        base = held if sent.knows(held) else None
        payload, arrived = sent.encode(mix.round, swap.own, base, self._wire(base))
        return MixVector(base, payload), arrived

    def _decode(self, mix: MixId, payload: Buffer, base: Vector | None) -> Vector:
        p, size = mix.fragment, self._replica.fragments[mix.fragment].size
        if mix.part == "outer":
            delta = decode(payload, self._outer_part(p).layout.size, self._settings.outer_wire)
            self._replica.check_outer_gradient(p, delta)
            return delta
        wire = self._wire(None if base is None else 0)
        known = np.zeros(size, np.float32) if base is None else base
        theirs = decode_difference(bytes(payload), known, wire)
        self._replica.check_partner(p, theirs)
        return theirs

    def _wire(self, held: int | None) -> WireFormat:
        wire = self._settings.start_wire
        return "int8" if held is None and wire == "int4" else wire

    # ---------------------------------------------------------------- below the quorum

    def take_values(self, mix: MixId, values: Vector, partners: Sequence[PeerId]) -> None:
        """Offers a copy of the learner's values."""
        self._swaps[mix.fragment, "local"] = _Swap(mix, values, tuple(partners))

    async def change(self, mix: MixId, row: Row) -> Vector:
        """What the partners' values change of ours."""
        return await self._holdings.compute(self._change, self._offered(mix), row)

    @staticmethod
    def _change(swap: _Swap, row: Row) -> Vector:
        return mix_parameters(np.zeros_like(swap.own), row, swap.exchanged())

    # ---------------------------------------------------------------- the outer step

    async def continuation(self, action: FinishRound) -> Continuation:
        """What the learner needs to go on from the next start."""
        return await self._holdings.compute(self._continuation, action)

    def _continuation(self, action: FinishRound) -> Continuation:
        state, mixed = self._mixed_start(action)
        settings = self._settings
        return Continuation.of(_worker(state), mixed, settings.learning_rate, settings.momentum)

    async def finish(
        self, action: FinishRound, continuation: Continuation, local: Vector
    ) -> FragmentState:
        """The state with which the learner has gone on from `local`."""
        return await self._holdings.compute(self._finish, action, continuation, local)

    def _finish(
        self, action: FinishRound, continuation: Continuation, local: Vector
    ) -> FragmentState:
        state = self._base(action)
        after = continuation.finish(_worker(state), local, self._settings.momentum)
        return make_finite_state(action.fragment, action.version, after.start, after.momentum)

    async def cut(self, mix: MixId, local: Vector, partners: Sequence[PeerId]) -> None:
        """Offers the outer gradient of a round that ended with `local`."""
        swap = await self._holdings.compute(self._cut, mix, local, tuple(partners))
        self._swaps[mix.fragment, "outer"] = swap

    def _cut(self, mix: MixId, local: Vector, partners: tuple[PeerId, ...]) -> _Swap:
        """All of a group mix the same vectors: ours is what the others decode. What is not mixed
        stays as it was.
        """
        start = self._offered(MixId(mix.fragment, mix.round, "start")).own
        wire = self._settings.outer_wire
        part = self._outer_part(mix.fragment)
        gradient = start - local
        payload = encode(part.take(gradient), wire)
        own = decode(payload, part.layout.size, wire)
        self._gradients[mix.fragment] = gradient
        swap = _Swap(mix, own, partners)
        swap.coded[self._settings.me] = None, (MixVector(None, payload), own)
        return swap

    async def finish_cut(self, action: FinishRound) -> FragmentState:
        return await self._holdings.compute(self._finish_cut, action)

    def _finish_cut(self, action: FinishRound) -> FragmentState:
        p, settings = action.fragment, self._settings
        state, mixed = self._mixed_start(action)
        swap = self._offered(MixId(p, action.round, "outer"))
        assert action.outers
        part, mine = self._outer_part(p), {settings.me: swap.own}
        mixed_part = mix_gradients(
            settings.me, mine | swap.theirs, action.outers, part.layout, settings.merge_rule
        )
        gradient = part.put(self._gradients.pop(p), mixed_part)
        after = finish_round(
            _worker(state), mixed, gradient, settings.learning_rate, settings.momentum
        )
        return make_finite_state(p, action.version, after.start, after.momentum)

    def _outer_part(self, fragment: int) -> Part:
        """The tensors of a fragment that Mix2 is for."""
        return self._settings.outer_parts[fragment]

    def _mixed_start(self, action: FinishRound) -> tuple[FragmentState, Vector]:
        state = self._base(action)
        exchanged = self._offered(MixId(action.fragment, action.round, "start")).exchanged()
        require_sound(state)
        counted = [exchanged[peer] for peer in action.starts.partners if peer in exchanged]
        if counted:
            apart = sum(norm(link.theirs - link.mine) ** 2 for link in counted) / len(counted)
            self._distances[action.fragment] = apart, norm(state.anchor) ** 2
        return state, mix_parameters(state.anchor, action.starts, exchanged)

    def _base(self, action: FinishRound) -> FragmentState:
        state = self._replica.state(action.fragment)
        if state is None or state.version != action.round:
            raise StaleBaseError(f"fragment {action.fragment} is no longer in round {action.round}")
        return state


def _worker(state: FragmentState) -> WorkerState:
    return WorkerState(state.anchor, state.momentum)


def _remember(kept: OrderedDict[PeerId, T], peer: PeerId, value: T) -> None:
    kept[peer] = value
    kept.move_to_end(peer)
    while len(kept) > RETURNING_MAX:
        kept.popitem(last=False)
