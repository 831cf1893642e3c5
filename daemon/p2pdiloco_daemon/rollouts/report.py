"""What the rollout worker's events add up to, over all its lives."""

from collections import deque
from dataclasses import dataclass, field

from p2pdiloco_daemon.rollouts.messages import (
    Finished,
    Installed,
    Load,
    Played,
    Ready,
    Refused,
)
from p2pdiloco_daemon.rollouts.worker import Died, RolloutEvent
from p2pdiloco_daemon.status import view

RATE_OVER_S = 10.0


@dataclass
class RolloutReport:
    state: view.RolloutState = view.RolloutState.STARTING
    served: int = 0
    refused: int = 0
    restarts: int = 0
    last_error: str | None = None
    policy_version: int | None = None
    running: int = 0
    waiting: int = 0
    _tokens: "_Total" = field(default_factory=lambda: _Total())
    _drafted: "_Total" = field(default_factory=lambda: _Total())
    _held: "_Total" = field(default_factory=lambda: _Total())
    _samples: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, tokens so far) of the last seconds."""

    def take(self, event: RolloutEvent, now: float) -> None:
        match event:
            case Ready():
                self.state = view.RolloutState.WAITING
            case Installed():
                self.state = view.RolloutState.SERVING
                self.policy_version = event.version
            case Finished() | Played():
                self.served += 1
            case Refused():
                self.refused += 1
            case Load():
                self._take_load(event, now)
            case Died():
                self.state, self.last_error = view.RolloutState.RESTARTING, event.reason
                self.restarts += 1
                self.policy_version, self.running, self.waiting = None, 0, 0
                for total in (self._tokens, self._drafted, self._held):
                    total.begin_life()
            case _:
                pass

    def status(self, now: float) -> view.Rollouts:
        return view.Rollouts(
            state=self.state,
            served=self.served,
            refused=self.refused,
            tokens=self._tokens.sum,
            tokens_per_s=self._tokens_per_s(now),
            draft_acceptance=self._held.sum / self._drafted.sum if self._drafted.sum else None,
            running=self.running,
            waiting=self.waiting,
            policy_version=self.policy_version,
            restarts=self.restarts,
            last_error=self.last_error,
        )

    def _take_load(self, load: Load, now: float) -> None:
        self.running, self.waiting = load.running, load.waiting
        self._tokens.take(load.tokens)
        self._drafted.take(load.drafted)
        self._held.take(load.held)
        self._samples.append((now, self._tokens.sum))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_OVER_S:
            self._samples.popleft()

    def _tokens_per_s(self, now: float) -> float:
        self._forget(now)
        before = self._samples[0][1] if self._samples else 0
        return (self._tokens.sum - before) / RATE_OVER_S


@dataclass
class _Total:
    """A count of the worker that starts anew in each of its lives."""

    _earlier: int = 0
    _present: int = 0

    @property
    def sum(self) -> int:
        return self._earlier + self._present

    def take(self, count: int) -> None:
        self._present = count

    def begin_life(self) -> None:
        self._earlier, self._present = self.sum, 0
