"""What goes wrong in an episode of chaos, drawn from its seed alone.

The same seed gives the same faults on every machine; where one of them cannot be had it is left
out, and nothing takes its place. Not here: how a fault is done to real processes (`chaos_swarm`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The value says it to a reader."""

    KILL_DAEMON = "kill -9 of the daemon"
    KILL_DAEMON_AND_DISK = "kill -9 of the daemon, its directory is lost"
    KILL_LEARNER = "kill -9 of the learner"
    KILL_P2PD = "kill -9 of p2pd"
    STOP_DAEMON = "SIGSTOP of the daemon"
    STOP_LEARNER = "SIGSTOP of the learner"
    STOP_P2PD = "SIGSTOP of p2pd"
    STOP_NODE = "SIGSTOP of all its processes"
    LEAVE = "leaves in order and returns"
    FILL_DISK = "its disk is full"
    CUT_OFF = "cut off from the others"
    KILL_ALL = "kill -9 of all daemons at once"


RESTARTS = frozenset(
    {Kind.KILL_DAEMON, Kind.KILL_DAEMON_AND_DISK, Kind.LEAVE, Kind.KILL_LEARNER, Kind.KILL_ALL}
)
"""What costs a start, which is 13 seconds of a core: never beside another fault's."""

HARMLESS_FOR_LEARNERS = frozenset({Kind.KILL_P2PD, Kind.STOP_P2PD, Kind.FILL_DISK, Kind.CUT_OFF})
"""Even that of the node itself trains on."""

LAST_S = {
    Kind.KILL_DAEMON: (0.0, 1.0),
    Kind.KILL_DAEMON_AND_DISK: (0.0, 1.0),
    Kind.KILL_LEARNER: (0.0, 0.0),
    Kind.KILL_P2PD: (0.0, 0.0),
    Kind.STOP_DAEMON: (1.0, 6.0),
    Kind.STOP_LEARNER: (1.0, 6.0),
    Kind.STOP_P2PD: (1.0, 6.0),
    Kind.STOP_NODE: (2.0, 8.0),
    Kind.LEAVE: (0.0, 1.0),
    Kind.FILL_DISK: (2.0, 5.0),
    Kind.CUT_OFF: (3.0, 7.0),
    Kind.KILL_ALL: (0.0, 1.0),
}
"""Shortest and longest time from the fault to its end, or to the start of what was killed. A member
is suspected after 3 s of silence."""

FAULTS_MAX = 3
WITHIN_S = 2.0
"""All begin within so long, so that some coincide."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Begins `at_s` after the episode and is undone `for_s` later."""

    kind: Kind
    nodes: tuple[str, ...]
    at_s: float
    for_s: float

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.at_s:.1f} s: {', '.join(self.nodes)}: {self.kind.value}{lasts}"


def draw(seed: int, names: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of an episode, in order of time. As many seeds in a row as there are kinds have
    each kind once; what comes beside it is drawn. No node has two at once, and one is spared.
    """
    deck = list(Kind)
    cycle, place = divmod(seed, len(deck))
    random.Random(cycle).shuffle(deck)
    rng = random.Random(f"episode {seed}")
    kinds = [deck[place]]
    if kinds[0] is not Kind.KILL_ALL:
        others = [kind for kind in deck if kind not in RESTARTS and kind is not kinds[0]]
        kinds += rng.sample(others, rng.randrange(min(FAULTS_MAX, len(names) - 1)))
    free = rng.sample(list(names), len(names))
    faults = [_fault(kind, rng, free, names) for kind in kinds]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(kind: Kind, rng: random.Random, free: list[str], names: Sequence[str]) -> Fault:
    nodes = tuple(names) if kind is Kind.KILL_ALL else (free.pop(),)
    return Fault(kind, nodes, rng.uniform(0, WITHIN_S), rng.uniform(*LAST_S[kind]))
