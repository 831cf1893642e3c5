"""The daemon's side of trajectories in an rl run: turns to be played, episodes to be checked.

What the worker played is kept here as long as its policy stays: whoever takes the dispatching over
asks for it. A turn in work is not: it belongs to those who wait for it.

Not here: the worker's lives (`rollouts`), and how others ask (`rl.routes`).
"""

import asyncio
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.protocol.placement import QUEUED_PER_ROW
from p2pdiloco.protocol.turns import Held, Holding, Load, TurnId
from p2pdiloco_daemon.children.channel import MESSAGE_BYTES_MAX
from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.rollouts.held_turns import HeldTurns, Played
from p2pdiloco_daemon.rollouts.messages import (
    Cancel,
    Check,
    Checked,
    Command,
    Installed,
    Message,
    Play,
    Refused,
    Speeds,
)
from p2pdiloco_daemon.rollouts.messages import Played as PlayedThere

ROWS_MAX = 32
"""Sequences that the worker runs at once."""
TURNS_MAX = QUEUED_PER_ROW * ROWS_MAX
"""Turns that are played, or wait for it: as many as a dispatcher gives."""
HISTORY_BYTES_MAX = MESSAGE_BYTES_MAX - 1024
"""A history, like an episode, travels to the worker in one frame."""
UNSENT_BYTES_MAX = 8 << 20
"""Of what waits for the worker to read it; a turn that is withdrawn before lies there all the
same."""
CHECKS_AT_ONCE = 16
"""That the worker has before it; more would only lie in its socket."""


class RolloutsBusy(P2PDilocoError):
    """No answer now; ask again later."""


class TurnRefused(P2PDilocoError):
    """The turn cannot be played: it is of another step, or its history is wrong."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The process ended, and with it the answer."""

    reason: str


_Reply = PlayedThere | Checked | Refused | _Lost


@dataclass(eq=False, slots=True)
class _Playing:
    """A turn in work. Who asks for the same turn with the same history waits for the same."""

    number: int
    turn: TurnId
    history: bytes
    reply: asyncio.Future[_Reply]
    num_asked: int = 0
    """Who wait for it."""
    is_dispatched: bool = False
    """The dispatcher is among them."""


class Trajectories:
    """`worker` gives the process, or raises RolloutsBusy; `next_id` the numbers of requests."""

    def __init__(self, worker: Callable[[], Child[Command]], next_id: Callable[[], int]) -> None:
        self._worker = worker
        self._next_id = next_id
        self._waiting: dict[int, asyncio.Future[_Reply]] = {}
        self._playing: list[_Playing] = []
        self._held = HeldTurns()
        self._version: int | None = None
        self._speeds: Speeds | None = None

    def load(self) -> Load | None:
        """None while there is no policy."""
        speeds = self._speeds
        if speeds is None or self._version is None:
            return None
        pace = zip(array("i", speeds.batches), array("f", speeds.token_s), strict=True)
        return Load(
            num_rows=speeds.num_rows,
            cache_tokens=speeds.cache_tokens,
            prefill_tokens_per_s=speeds.prefill_tokens_per_s,
            token_s=tuple(pace),
            held=self._held.all(),
        )

    def held(self, step: int, trajectory: int) -> Played | None:
        """What was played last of a trajectory of the present step."""
        return self._held.of(step, trajectory)

    async def play(self, turn: TurnId, history: bytes, *, dispatched: bool = True) -> Played:
        """See `Rollouts.play`."""
        if dispatched:
            history = history or self._held.history_of(turn)
        playing = self._playing_of(turn, history) or self._begin(turn, history)
        if dispatched:
            self._held.begins(turn)
            playing.is_dispatched = True
        playing.num_asked += 1
        try:
            reply = await asyncio.shield(playing.reply)
        finally:
            playing.num_asked -= 1
            if not playing.num_asked:
                self._playing.remove(playing)
                self._forget(playing.number)
        if isinstance(reply, PlayedThere):
            return _played(turn, reply)
        raise _refusal(reply)

    async def check(
        self, step: int, episodes: Sequence[bytes], replayed: Collection[int], *, ended: bool
    ) -> list[str | None]:
        """See `Rollouts.check`."""
        found: list[str | None] = []
        for first in range(0, len(episodes), CHECKS_AT_ONCE):
            part = episodes[first : first + CHECKS_AT_ONCE]
            some = [index - first for index in replayed]
            found += await self._check(step, part, some, ended)
        return found

    def take(self, message: Message) -> None:
        """What the worker says; much of it is not for us."""
        match message:
            case PlayedThere() | Checked() | Refused() if message.id in self._waiting:
                self._answered(message)
            case Installed():
                if message.version != self._version:
                    self._held.clear()
                self._version = message.version
            case Speeds():
                self._speeds = message
            case _:
                pass

    def void(self) -> None:
        """Of what the present policy plays nothing counts any more: another of the same version
        comes, that of another lineage. Until it is there, there is none."""
        self._version = None
        self._held.clear()

    def life_over(self, reason: str) -> None:
        """Nothing of what is in work will be answered. What was played stays known, until another
        policy comes."""
        self._speeds = None
        for future in self._waiting.values():
            _settle(future, _Lost(reason))
        self._waiting.clear()

    def _answered(self, reply: PlayedThere | Checked | Refused) -> None:
        if isinstance(reply, PlayedThere):
            playing = next(p for p in self._playing if p.number == reply.id)
            if playing.is_dispatched:
                self._held.keep(_played(playing.turn, reply))
        _settle(self._waiting.pop(reply.id), reply)

    def _playing_of(self, turn: TurnId, history: bytes) -> _Playing | None:
        return next((p for p in self._playing if p.turn == turn and p.history == history), None)

    def _begin(self, turn: TurnId, history: bytes) -> _Playing:
        worker = self._worker()
        if len(self._playing) >= TURNS_MAX:
            raise RolloutsBusy(f"{len(self._playing)} turns are in work; ask again later")
        if worker.num_unsent > UNSENT_BYTES_MAX:
            raise RolloutsBusy("the worker has not read all that it was asked; ask again later")
        if len(history) > HISTORY_BYTES_MAX:
            raise TurnRefused(
                f"a history of {len(history)} bytes; at most {HISTORY_BYTES_MAX} are read"
            )
        number, reply = self._wait()
        worker.send(Play(number, turn.step, turn.trajectory, turn.turn, history))
        playing = _Playing(number, turn, history, reply)
        self._playing.append(playing)
        return playing

    async def _check(
        self, step: int, episodes: Sequence[bytes], replayed: Collection[int], ended: bool
    ) -> list[str | None]:
        worker, waiting = self._worker(), []
        try:
            for index, episode in enumerate(episodes):
                number, reply = self._wait()
                waiting.append((number, reply))
                if len(episode) <= HISTORY_BYTES_MAX:
                    worker.send(Check(number, step, episode, ended, index in replayed))
                else:
                    self._answered(Checked(number, f"it has {len(episode)} bytes"))
            return [_checked(await reply) for _number, reply in waiting]
        finally:
            for number, _reply in waiting:
                self._forget(number)

    def _wait(self) -> tuple[int, asyncio.Future[_Reply]]:
        number = self._next_id()
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, future

    def _forget(self, number: int) -> None:
        """Nobody waits for it any more."""
        if self._waiting.pop(number, None):
            self._worker().send(Cancel(number))


def _settle(future: asyncio.Future[_Reply], reply: _Reply) -> None:
    if not future.done():  # whoever waited may have been cancelled just now
        future.set_result(reply)


def _played(turn: TurnId, reply: PlayedThere) -> Played:
    holding = Holding.ENDED if reply.has_ended else Holding.READY
    now = TurnId(turn.step, turn.trajectory, reply.turn)
    return Played(Held(now, holding, reply.num_tokens), reply.num_reused, reply.episode)


def _checked(reply: _Reply) -> str | None:
    if not isinstance(reply, Checked):
        raise _refusal(reply)
    return reply.refusal or None


def _refusal(reply: _Reply) -> RolloutsBusy | TurnRefused:
    assert isinstance(reply, Refused | _Lost)
    if isinstance(reply, _Lost) or reply.is_busy:
        return RolloutsBusy(reply.reason)
    return TurnRefused(reply.reason)
