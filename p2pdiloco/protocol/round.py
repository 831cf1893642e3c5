"""One round at the synchronizer: open, gather, pull, merge; it ends in a commit or is given up.

    GATHERING --quorum and grace--> PULLING --all in, or time is up--> MERGING --> (commit)
        \\__ no quorum in time: given up      \\__ fewer than a quorum left: given up

Every decision comes with the sentence that explains it; the same sentence goes into the record, the
log and the page.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2pdiloco.protocol.naming import PeerId, RoundId, sentence
from p2pdiloco.protocol.wire import ContributionReady

GATHER_MIN_S = 20.0
"""A round without quorum is given up after this, or after four times what tau steps take if that is
more.
"""
PULL_MIN_S = 10.0
"""A pull is given up after this, or after eight times what a sync usually takes: the shell sees to
stalls sooner.
"""


class Stage(enum.Enum):
    GATHERING = "gathering"
    PULLING = "pulling"
    MERGING = "merging"


@dataclass(slots=True)
class Pulled:
    tokens: int
    steps: int


@dataclass
class Round:
    """`invited` are the ready members at opening, this node included. All times are seconds of the
    monotonic clock.
    """

    id: RoundId
    parent: str
    invited: tuple[PeerId, ...]
    quorum: int
    opened: float
    gather_deadline: float
    stage: Stage = Stage.GATHERING
    reports: dict[PeerId, ContributionReady] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)
    admitted: tuple[PeerId, ...] = ()
    pulled: dict[PeerId, Pulled] = field(default_factory=dict)
    quorum_at: float | None = None
    grace_until: float | None = None
    pull_deadline: float = 0.0
    closed: float = 0.0
    reason: str = "just opened"

    @property
    def deadline(self) -> float | None:
        if self.stage is Stage.GATHERING:
            return self.gather_deadline if self.grace_until is None else self.grace_until
        return self.pull_deadline if self.stage is Stage.PULLING else None

    @property
    def waiting_for(self) -> list[PeerId]:
        return [p for p in self.invited if p not in self.reports and p not in self.refused]

    def report(self, peer: PeerId, report: ContributionReady, now: float) -> bool:
        """Takes in a report; True when it is the K-th, from which the grace window counts."""
        if peer not in self.invited:
            return False
        if self.stage is not Stage.GATHERING:
            if peer not in self.reports:
                self.refused[peer] = "late: the round had closed"
            return False
        self.reports[peer] = report
        self.refused.pop(peer, None)
        if self.quorum_at is None and len(self.reports) >= self.quorum:
            self.quorum_at = now
            return True
        return False

    def decline(self, peer: PeerId, reason: str) -> None:
        if self.stage is Stage.GATHERING and peer in self.invited:
            self.refused[peer] = reason
            self.reports.pop(peer, None)
            if len(self.reports) < self.quorum:
                self.quorum_at = self.grace_until = None

    def decide(self, now: float) -> tuple[Sequence[PeerId] | None, str]:
        """(whom to merge, why), or (None, what the round waits for). An empty sequence gives the
        round up.
        """
        num, waiting = len(self.reports), self.waiting_for
        if num >= self.quorum and not waiting:
            return self._admitted(), f"all {num} of {len(self.invited)} invited have answered"
        if self.quorum_at is not None and num >= self.quorum:
            assert self.grace_until is not None
            waited = self.grace_until - self.quorum_at
            if now >= self.grace_until:
                return self._admitted(), (
                    f"quorum {self.quorum} met, {num} of {len(self.invited)} ready "
                    f"when the grace window of {waited:.2f} s closed"
                )
            left = self.grace_until - now
            return (
                None,
                f"{num}/{len(self.invited)} ready, {left:.2f} s of grace for {len(waiting)} more",
            )
        if not waiting or now >= self.gather_deadline:
            why = next(iter(self.refused.values()), "")
            return (), sentence(
                f"no quorum: {num} of {self.quorum} needed were ready" + (why and f" ({why})")
            )
        return (
            None,
            f"quorum {num}/{self.quorum}, waiting for {len(waiting)} of {len(self.invited)}",
        )

    def close(self, admitted: Sequence[PeerId], reason: str, now: float, pull_s: float) -> None:
        self.stage, self.reason, self.closed = Stage.PULLING, reason, now
        self.admitted = tuple(admitted)
        self.pull_deadline = now + pull_s

    def pull_done(self, peer: PeerId, pulled: Pulled) -> None:
        if self.stage is Stage.PULLING and peer in self.admitted and peer not in self.refused:
            self.pulled[peer] = pulled

    def pull_failed(self, peer: PeerId, reason: str) -> None:
        if self.stage is Stage.PULLING and peer in self.admitted and peer not in self.pulled:
            self.refused[peer] = reason

    def pulls_open(self) -> list[PeerId]:
        return [p for p in self.admitted if p not in self.pulled and p not in self.refused]

    def _admitted(self) -> list[PeerId]:
        return sorted(self.reports)
