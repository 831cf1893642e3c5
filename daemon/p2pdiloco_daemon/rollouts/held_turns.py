"""What a rollout worker has played of the present step: for whoever takes the dispatching over."""

from collections import OrderedDict
from dataclasses import dataclass

from p2pdiloco.protocol.turns import HELD_MAX, Held, Holding, TurnId

HELD_BYTES_MAX = 64 << 20
"""Of packed episodes; an hour of turns of a small model. The oldest give way."""


@dataclass(frozen=True, slots=True)
class Played:
    """Where a trajectory stands after a turn: the next turn is READY, or this one ENDED it."""

    held: Held
    num_reused: int
    """Of the turn's prompt, tokens that did not have to be computed."""
    episode: bytes
    """Packed; so far, with what the environment said to the last answer, if it goes on."""

    @property
    def holding(self) -> Holding:
        return self.held.holding


class HeldTurns:
    """The newest of each trajectory, within `HELD_MAX` and `HELD_BYTES_MAX`."""

    def __init__(self) -> None:
        self._played: OrderedDict[int, Played] = OrderedDict()
        """By trajectory; those of one step."""
        self._num_bytes = 0

    def all(self) -> tuple[Held, ...]:
        return tuple(played.held for played in self._played.values())

    def of(self, step: int, trajectory: int) -> Played | None:
        played = self._played.get(trajectory)
        return played if played and played.held.turn.step == step else None

    def history_of(self, turn: TurnId) -> bytes:
        """From which the turn goes on; empty if it is not what comes next."""
        played = self.of(turn.step, turn.trajectory)
        is_next = played is not None and played.held == Held(
            turn, Holding.READY, played.held.num_tokens
        )
        return played.episode if played and is_next else b""

    def begins(self, turn: TurnId) -> None:
        """Who wants a turn anew does not count on what came of it before."""
        played = self._played.get(turn.trajectory)
        if played and (played.held.turn > turn or played.holding is Holding.ENDED):
            self._forget(turn.trajectory)

    def keep(self, played: Played) -> None:
        trajectory = played.held.turn.trajectory
        self._forget(trajectory)
        self._played[trajectory] = played
        self._num_bytes += len(played.episode)
        while len(self._played) > HELD_MAX or self._num_bytes > HELD_BYTES_MAX:
            self._forget(next(iter(self._played)))

    def clear(self) -> None:
        """The step is over."""
        self._played.clear()
        self._num_bytes = 0

    def _forget(self, trajectory: int) -> None:
        if played := self._played.pop(trajectory, None):
            self._num_bytes -= len(played.episode)
