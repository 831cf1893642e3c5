"""Which workers a dispatcher asks for turns, and what it remembers of each.

A worker that fails is asked again after a short pause, longer each time in a row; one that lied is
not asked for long. What it gave before is counted all the same.
"""

from dataclasses import dataclass, field

from p2pdiloco.protocol.naming import PeerId, sentence
from p2pdiloco.protocol.pauses import Pauses

FAILED_S, FAILED_MAX_S = 1.0, 120.0
"""A worker that restarts needs some seconds."""
LIED_S, LIED_MAX_S = 600.0, 4 * 3600.0
"""Also of a worker that holds turns back."""
WORKERS_MAX = 1024
"""Workers that are remembered; of more, the one that gave least is forgotten."""


@dataclass(slots=True)
class Record:
    """Of one worker, in this life of the dispatcher."""

    turns: int = 0
    tokens: int = 0
    """Generated."""
    prompt_tokens: int = 0
    reused: int = 0
    """Of the prompts' tokens, those that its cache had."""
    failures: int = 0
    lies: int = 0
    last_problem: str | None = None


@dataclass
class Standing:
    """Times are monotonic seconds."""

    records: dict[PeerId, Record] = field(default_factory=dict)
    _failed: Pauses = field(default_factory=lambda: Pauses(FAILED_S, FAILED_MAX_S))
    _left_alone: Pauses = field(default_factory=lambda: Pauses(LIED_S, LIED_MAX_S))

    def may_ask(self, worker: PeerId, now: float) -> bool:
        return self._failed.over(worker, now) and self._left_alone.over(worker, now)

    def gave(self, worker: PeerId, new_tokens: int, prompt_tokens: int, reused: int) -> None:
        """A turn that is right, as far as it was checked."""
        record = self._of(worker)
        record.turns += 1
        record.tokens += new_tokens
        record.prompt_tokens += prompt_tokens
        record.reused += min(reused, prompt_tokens)
        self._failed.forgive(worker)

    def failed(self, worker: PeerId, reason: str, now: float) -> float:
        """It gave no turn; says for how long it is left alone."""
        record = self._of(worker)
        record.failures += 1
        record.last_problem = sentence(reason)
        return self._failed.begin(worker, now)

    def dawdled(self, worker: PeerId, reason: str, now: float) -> float:
        """It took longer than anybody may, which costs as long as a lie; says for how long it is
        left alone."""
        record = self._of(worker)
        record.failures += 1
        record.last_problem = sentence(reason)
        return self._left_alone.begin(worker, now)

    def lied(self, worker: PeerId, reason: str, now: float) -> float:
        """What it gave is not true; says for how long it is left alone."""
        record = self._of(worker)
        record.lies += 1
        record.last_problem = sentence(reason)
        return self._left_alone.begin(worker, now)

    def _of(self, worker: PeerId) -> Record:
        if worker not in self.records and len(self.records) >= WORKERS_MAX:
            del self.records[min(self.records, key=lambda peer: (self.records[peer].turns, peer))]
        return self.records.setdefault(worker, Record())
