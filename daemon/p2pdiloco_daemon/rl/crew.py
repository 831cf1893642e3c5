"""The workers that a dispatcher can ask: its own without the network, the others over it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.turns import Holding, Load, TurnId
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy


class Played(Protocol):
    """A turn that was generated, or that a worker holds."""

    @property
    def holding(self) -> Holding: ...
    @property
    def num_reused(self) -> int: ...
    @property
    def episode(self) -> bytes: ...


class HeardLoad(Protocol):
    """How a worker is, the version of its policy, and what the link to it takes."""

    @property
    def version(self) -> int: ...
    @property
    def load(self) -> Load: ...
    @property
    def rtt_s(self) -> float: ...


class OwnWorker(Protocol):
    """Of a `p2pdiloco_daemon.rollouts.worker.Rollouts`, what is asked here."""

    @property
    def version(self) -> int | None: ...
    def load(self) -> Load | None: ...
    def held(self, step: int, trajectory: int) -> Played | None: ...
    async def play(self, turn: TurnId, history: bytes) -> Played: ...
    async def check(
        self,
        step: int,
        episodes: Sequence[bytes],
        replayed: Collection[int],
        *,
        ended: bool = True,
    ) -> Sequence[str | None]: ...


class PeerWorkers(Protocol):
    """Of a `p2pdiloco_daemon.rl.client.Workers`, what is asked here."""

    async def load(self, peer: str) -> HeardLoad: ...
    async def play(self, peer: str, turn: TurnId, history: bytes) -> Played: ...
    async def held(self, peer: str, step: int, trajectory: int) -> Played: ...


@dataclass(frozen=True, slots=True)
class Heard:
    """How a worker is; `rtt_s` is what the link to it was measured to take."""

    version: int
    load: Load
    rtt_s: float


class Crew:
    """`own` gives this node's worker, None while there is none. Questions raise what those of
    `Rollouts` and of `Workers` raise."""

    def __init__(
        self, me: PeerId, own: Callable[[], OwnWorker | None], others: PeerWorkers
    ) -> None:
        self.me = me
        self._own = own
        self._others = others

    async def load(self, worker: PeerId) -> Heard:
        if worker == self.me:
            mine = self._mine()
            version, load = mine.version, mine.load()
            if version is None or load is None:
                raise RolloutsBusy("our own worker has no policy yet")
            return Heard(version, load, 0.0)
        heard = await self._others.load(worker)
        return Heard(heard.version, heard.load, heard.rtt_s)

    async def play(self, worker: PeerId, turn: TurnId, history: bytes) -> Played:
        if worker == self.me:
            return await self._mine().play(turn, history)
        return await self._others.play(worker, turn, history)

    async def held(self, worker: PeerId, step: int, trajectory: int) -> Played:
        if worker == self.me:
            held = self._mine().held(step, trajectory)
            if held is None:
                raise RolloutsBusy("our own worker does not hold it any more")
            return held
        return await self._others.held(worker, step, trajectory)

    def _mine(self) -> OwnWorker:
        own = self._own()
        if own is None:
            raise RolloutsBusy("this node has no rollout worker")
        return own
