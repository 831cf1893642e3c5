"""How far each trajectory of a step is, and what may be expected of those not at an end."""

from dataclasses import dataclass, field
from enum import Enum

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.pacing import Average
from p2pdiloco.protocol.turns import Holding, Step, TurnId

FOLLOW = 0.3
"""alpha of WAR's moving averages: weight of what was observed last."""
TURNS_PRIOR, NEW_TOKENS_PRIOR = 4.0, 128.0
"""Believed before anything of the step is known."""


class Stage(Enum):
    """Where a trajectory is; `placement.py` draws the transitions."""

    WAITING = "waiting"
    GENERATING = "generating"
    ACTING = "acting"
    ENDED = "ended"
    GIVEN_UP = "given up"


_RANK = {
    Stage.WAITING: Holding.READY,
    Stage.GENERATING: Holding.GENERATING,
    Stage.ACTING: Holding.ACTING,
    Stage.ENDED: Holding.ENDED,
}
_ORDER = list(Holding)


@dataclass(slots=True)
class Trajectory:
    """`turn` is the one that waits, is generated, or is acted on."""

    id: int
    group: int
    prompt_tokens: int
    """Of that turn: the whole trajectory before it."""
    num_tokens: int
    """With its answer, once it is generated."""
    since: float
    """When it came to its stage."""
    stage: Stage = Stage.WAITING
    turn: int = 0
    worker: PeerId | None = None
    """Where it is active; None while it waits or is at an end."""
    home: PeerId | None = None
    """Where it was active last: its history may be cached there."""
    computed: int = 0
    """Tokens of its history that home has computed."""
    tries: int = 0
    """Times that this turn was placed."""
    deadline: float | None = None
    """When its worker is no longer waited for."""

    @property
    def is_open(self) -> bool:
        """Not at an end."""
        return self.stage not in (Stage.ENDED, Stage.GIVEN_UP)

    def is_behind(self, turn: int, holding: Holding) -> bool:
        """Whether somebody who holds this is further than what is known."""
        if not self.is_open:
            return False
        known = self.turn, _ORDER.index(_RANK[self.stage])
        return known < (turn, _ORDER.index(holding))


def _average() -> Average:
    return Average(weight=FOLLOW)


@dataclass(slots=True)
class Expectations:
    """WAR's moving average of turns per group, and the same of tokens per turn; what a group has
    not shown yet is taken from all."""

    _turns: dict[int, Average] = field(default_factory=dict)
    _new_tokens: dict[int, Average] = field(default_factory=dict)
    _all_turns: Average = field(default_factory=_average)
    _all_new_tokens: Average = field(default_factory=_average)

    def trajectory_ended(self, group: int, turns: int) -> None:
        self._turns.setdefault(group, _average()).add(turns)
        self._all_turns.add(turns)

    def turn_finished(self, group: int, new_tokens: int) -> None:
        self._new_tokens.setdefault(group, _average()).add(new_tokens)
        self._all_new_tokens.add(new_tokens)

    def turns(self, group: int) -> float:
        """Of a whole trajectory of this group."""
        return self._known(self._turns.get(group), self._all_turns, TURNS_PRIOR)

    def turns_left(self, group: int, turn: int) -> float:
        """This one included. Lengths have a long tail: what has outlived its group's average goes
        on for half as long as it has."""
        return max(1.0, self.turns(group) - turn, turn / 2)

    def new_tokens(self, group: int) -> float:
        """Of one answer."""
        return self._known(self._new_tokens.get(group), self._all_new_tokens, NEW_TOKENS_PRIOR)

    @staticmethod
    def _known(of_group: Average | None, of_all: Average, prior: float) -> float:
        if of_group is not None and of_group.value is not None:
            return of_group.value
        return prior if of_all.value is None else of_all.value


def trajectories_of(step: Step, now: float) -> list[Trajectory]:
    """All of a step, none begun."""
    return [
        Trajectory(index, group, num_tokens, num_tokens, now)
        for index in range(step.num_trajectories)
        for group in [index // step.group_size]
        for num_tokens in [step.prompt_tokens[group]]
    ]


def turn_id(step: Step, trajectory: Trajectory) -> TurnId:
    return TurnId(step.number, trajectory.id, trajectory.turn)
