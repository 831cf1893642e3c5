"""The errands of a node that gossips: vectors are swapped with partners, rounds are ended."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from p2pdiloco.errors import P2PDilocoError, PeerError
from p2pdiloco.learn.predictions import prediction_distance, unpack_predictions
from p2pdiloco.optim.mixing import Continuation
from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.naming import MixId, MixPart, PeerId
from p2pdiloco_bootstrap.shelf import MixVector
from p2pdiloco_daemon.exchange import Exchange
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.mixing import Mixing
from p2pdiloco_daemon.status.curve import Curve
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.replica import FragmentState, Vector

GossipAction = (
    actions.OpenMix
    | actions.FetchMix
    | actions.CutRound
    | actions.FinishRound
    | actions.TakeValues
    | actions.BlendValues
)

COMPARE_S = 20.0
COMPARED_MAX = 4
"""Partners that are asked for 32 KiB of predictions, each time."""

logger = logging.getLogger(__name__)

LEARNER_DIED = "the learner died before the round ended"


class Learner(Protocol):
    """What is asked of a learner; see `p2pdiloco_daemon.learner.learner.Learner`."""

    def install(self, fragment: int, version: int, values: Vector) -> bool: ...
    def snapshot(self, fragment: int, base_version: int, *, hold: bool = False) -> int: ...
    def end_round(self, fragment: int, version: int, base: Vector, share: float) -> bool: ...
    def blend(self, fragment: int, version: int, change: Vector) -> bool: ...


class Shell(Protocol):
    """What is needed of the `NodeShell`."""

    @property
    def learner(self) -> Learner | None: ...
    def post(self, event: events.Event) -> None: ...
    def start(self, errand: Coroutine[Any, Any, None], name: str) -> None: ...
    def tell_damage(self, error: BaseException) -> None: ...
    def merged(self) -> None: ...


@dataclass(slots=True)
class _Ending:
    """A round that the learner is to go on from: by itself, from `continuation`, or from `state`,
    which is being installed.
    """

    action: actions.FinishRound
    continuation: Continuation | None = None
    state: FragmentState | None = None


class GossipErrands:
    def __init__(
        self,
        shell: Shell,
        mixing: Mixing,
        holdings: Holdings,
        exchange: Exchange,
        expected: tuple[type[Exception], ...],
    ) -> None:
        self.mixing = mixing
        self._shell = shell
        self._holdings = holdings
        self._exchange = exchange
        self._expected = expected
        self.output_distance: float | None = None
        """Jensen-Shannon distance to the partners compared last, mean."""
        self.output_distances = Curve()
        self._step = 0
        self._predictions: bytes | None = None
        self._cuts: dict[int, actions.CutRound] = {}
        self._endings: dict[int, _Ending] = {}
        self._takes: dict[int, actions.TakeValues] = {}
        self._blends: dict[int, actions.BlendValues] = {}
        self._versions: dict[int, int] = {}
        """From which the values grew that were taken last, by fragment."""

    async def vector_for(
        self, peer: str, part: str, fragment: int, round_: int, held: int | None
    ) -> MixVector | None:
        """For the server: to partners of that round, nobody else."""
        await self._holdings.written()  # what we tell of must outlive this process
        mix = MixId(fragment, round_, _part(part))
        return await self.mixing.vector_for(PeerId(peer), mix, held)

    def predictions(self) -> bytes | None:
        """For the server: what our learner predicted when it was last evaluated."""
        return self._predictions

    async def compare(self, partners: Callable[[], Sequence[PeerId]]) -> None:
        """For ever: how far partners are from us in what they predict. It is compared anew when one
        of us has been evaluated since."""
        compared: list[bytes] = []
        while True:
            await asyncio.sleep(COMPARE_S)
            if self._predictions is None:
                continue
            told: list[bytes] = [self._predictions]
            distances = []
            for peer in partners()[:COMPARED_MAX]:
                with suppress(*self._expected):
                    theirs = await self._exchange.predictions(peer)
                    mine = unpack_predictions(told[0])
                    distances.append(prediction_distance(mine, unpack_predictions(theirs)))
                    told.append(theirs)
            if distances and told != compared:
                compared = told
                self.output_distance = sum(distances) / len(distances)
                self.output_distances.add(self._step, self.output_distance)
                apart = self.mixing.distance or (0.0, 0.0)
                logger.info(
                    "disagreement with %d partners: %.4f in outputs (Jensen-Shannon), "
                    "%.3f in parameters (%.2f %%)",
                    len(distances),
                    self.output_distance,
                    apart[0],
                    100 * apart[1],
                )

    def carry_out(self, action: GossipAction) -> None:
        match action:
            case actions.OpenMix(mix, partners):
                self.mixing.open(mix, partners)
            case actions.FetchMix(mix, peer):
                self._shell.start(self._fetch(mix, peer), f"fetch {mix} of {peer}")
            case actions.CutRound(fragment, round_, _):
                if learner := self._shell.learner:
                    self._cuts[learner.snapshot(fragment, round_, hold=True)] = action
                else:
                    self._unfinished(action, LEARNER_DIED)
            case actions.FinishRound(fragment, _, _, _, None):
                self._shell.start(self._go_on(action), f"end round of fragment {fragment}")
            case actions.FinishRound(fragment):
                self._shell.start(self._install(action), f"end round of fragment {fragment}")
            case actions.TakeValues(fragment, _, version, _):
                if learner := self._shell.learner:
                    self._takes[learner.snapshot(fragment, version)] = action
                else:
                    self._values_lost(action, LEARNER_DIED)
            case actions.BlendValues(fragment):
                self._shell.start(self._blend(action), f"blend fragment {fragment}")

    def on_learner(self, event: learners.LearnerEvent) -> None:
        """After the core was told of it."""
        match event:
            case learners.RoundLeft():
                self._round_left(event)
            case learners.Snapshot():
                self._snapshot(event)
            case learners.SnapshotRefused():
                self._snapshot_refused(event)
            case learners.Installed():
                self._installed(event)
            case learners.Blended():
                self._blended(event)
            case learners.Evaluated():
                self._predictions = _sound(event.predictions)
            case learners.StepsDone():
                self._step = event.step
            case learners.Died():
                self._learner_died()
            case _:
                pass

    async def _fetch(self, mix: MixId, peer: PeerId) -> None:
        held, most = self.mixing.held(mix, peer), self.mixing.bytes_max(mix)
        number = held[0] if held else None
        answer: events.Event = events.MixFetched(mix, peer)
        try:
            vector = await self._exchange.pull_vector(
                peer, mix.part, mix.fragment, mix.round, number, most
            )
            await self.mixing.take(mix, peer, vector, held)
        except PeerError as error:
            answer = events.MixFailed(mix, peer, str(error), hostile=True)
        except self._expected as error:
            self._shell.tell_damage(error)
            answer = events.MixFailed(mix, peer, str(error) or type(error).__name__)
        self._shell.post(answer)

    # ---------------------------------------------------------------- without a Mix2

    async def _go_on(self, action: actions.FinishRound) -> None:
        try:
            continuation = await self.mixing.continuation(action)
        except P2PDilocoError as error:
            self._failed(action, error)
            return
        p, learner = action.fragment, self._shell.learner
        ending = self._endings[p] = _Ending(action, continuation)
        base, share = continuation.base, continuation.share
        if not (learner and learner.end_round(p, action.version, base, share)):
            self._drop(ending, LEARNER_DIED)

    def _round_left(self, event: learners.RoundLeft) -> None:
        """The learner has gone on; the core hears of its counters in their order."""
        self._shell.post(events.FragmentInstalled(event.fragment, event.version, event.tokens))
        ending = self._endings.pop(event.fragment, None)
        if ending and ending.continuation and ending.action.version == event.version:
            hold = self._hold(ending.action, ending.continuation, event.values)
            self._shell.start(hold, f"hold fragment {event.fragment}")

    async def _hold(
        self, action: actions.FinishRound, continuation: Continuation, local: Vector
    ) -> None:
        try:
            state = await self.mixing.finish(action, continuation, local)
        except P2PDilocoError as error:
            self._failed(action, error)
        else:
            self._finished(state)

    # ---------------------------------------------------------------- with a Mix2

    def _snapshot(self, event: learners.Snapshot) -> None:
        if action := self._cuts.pop(event.request_id, None):
            self._shell.start(self._cut(action, event.values), f"cut fragment {event.fragment}")
        if take := self._takes.pop(event.request_id, None):
            mix = MixId(take.fragment, take.round, "local")
            self._versions[take.fragment] = take.version
            self.mixing.take_values(mix, event.values, take.partners)
            self._shell.post(events.ValuesTaken(take.fragment, take.round))

    def _snapshot_refused(self, event: learners.SnapshotRefused) -> None:
        if action := self._cuts.pop(event.request_id, None):
            self._unfinished(action, event.reason)
        if take := self._takes.pop(event.request_id, None):
            self._values_lost(take, event.reason)

    async def _cut(self, action: actions.CutRound, local: Vector) -> None:
        mix = MixId(action.fragment, action.round, "outer")
        try:
            await self.mixing.cut(mix, local, action.partners)
        except P2PDilocoError as error:
            self._failed(action, error)
        else:
            self._shell.post(events.RoundCut(action.fragment, action.round))

    async def _install(self, action: actions.FinishRound) -> None:
        try:
            state = await self.mixing.finish_cut(action)
        except P2PDilocoError as error:
            self._failed(action, error)
            return
        ending = self._endings[action.fragment] = _Ending(action, state=state)
        learner = self._shell.learner
        if not (learner and learner.install(action.fragment, state.version, state.anchor)):
            self._drop(ending, LEARNER_DIED)

    def _installed(self, event: learners.Installed) -> None:
        ending = self._endings.get(event.fragment)
        if ending and ending.state and ending.state.version == event.version:
            del self._endings[event.fragment]
            self._finished(ending.state)

    # ---------------------------------------------------------------- below the quorum

    async def _blend(self, action: actions.BlendValues) -> None:
        p = action.fragment
        try:
            change = await self.mixing.change(MixId(p, action.round, "local"), action.row)
        except P2PDilocoError as error:
            self._values_lost(action, str(error))
            return
        learner = self._shell.learner
        self._blends[p] = action
        if not (learner and learner.blend(p, self._versions[p], change)):
            self._blends.pop(p, None)
            self._values_lost(action, LEARNER_DIED)

    def _blended(self, event: learners.Blended) -> None:
        if action := self._blends.pop(event.fragment, None):
            if event.done:
                self._shell.post(events.ValuesBlended(action.fragment, action.round))
            else:
                self._values_lost(action, "the learner has received another version")

    def _values_lost(self, action: actions.TakeValues | actions.BlendValues, reason: str) -> None:
        self._shell.post(events.ValuesLost(action.fragment, action.round, reason))

    # ---------------------------------------------------------------- how it ends

    def _learner_died(self) -> None:
        for cut in self._cuts.values():
            self._unfinished(cut, LEARNER_DIED)
        self._cuts.clear()
        self._takes.clear()
        self._blends.clear()
        for ending in list(self._endings.values()):
            self._drop(ending, LEARNER_DIED)

    def _finished(self, state: FragmentState) -> None:
        self._holdings.hold_own(state)
        self._shell.merged()
        self._shell.post(events.RoundFinished(state.fragment, state.version, state.digest))

    def _drop(self, ending: _Ending, reason: str) -> None:
        if self._endings.get(ending.action.fragment) is ending:
            del self._endings[ending.action.fragment]
        self._unfinished(ending.action, reason)

    def _failed(
        self, action: actions.CutRound | actions.FinishRound, error: P2PDilocoError
    ) -> None:
        self._shell.tell_damage(error)
        self._unfinished(action, str(error))

    def _unfinished(self, action: actions.CutRound | actions.FinishRound, reason: str) -> None:
        self._shell.post(events.RoundUnfinished(action.fragment, action.round, reason))


def _sound(predictions: bytes) -> bytes | None:
    """None for those of a model that has diverged: nobody could compare with them."""
    with suppress(PeerError):
        unpack_predictions(predictions)
        return predictions
    return None


def _part(name: str) -> MixPart:
    """Of a path, which names no others."""
    match name:
        case "start" | "outer" | "local":
            return name
    raise AssertionError(name)
