"""What the rollout process of an rl run does for trajectories: plays turns, checks episodes.

A turn belongs to the step of the policy that plays it. When the policy changes, what is being
generated is void: its tokens would be of two policies.
"""

from collections import deque
from collections.abc import Callable

import torch

from p2pdiloco.errors import P2PDilocoError, PeerError
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.rl.checks import Refusal, Rulebook, resume, story
from p2pdiloco.rl.episodes import Episode, pack, unpack
from p2pdiloco.rl.playing import Player, Turned
from p2pdiloco.rl.replay import replay
from p2pdiloco.rollout.backend import Backend
from p2pdiloco.rollout.request import Progress, QueueFull
from p2pdiloco_daemon.rollouts.messages import Check, Checked, Message, Play, Played, Refused


class Turns:
    """Answers `Play` and `Check`. `rulebook` gives the rules of a step."""

    def __init__(
        self, engine: Backend, rulebook: Callable[[int], Rulebook], post: Callable[[Message], None]
    ) -> None:
        self._engine = engine
        self._rulebook = rulebook
        self._post = post
        self._player: Player | None = None
        """None before the first policy."""
        self._checks: deque[Check] = deque()

    @property
    def has_checks(self) -> bool:
        """Whether `check_next` has something to do."""
        return bool(self._checks)

    def play(self, wanted: Play) -> None:
        if self._player is None or wanted.step > self._engine.version:
            self._post(Refused(wanted.id, _not_yet(wanted.step), is_busy=True))
            return
        turn = TurnId(wanted.step, wanted.trajectory, wanted.turn)
        try:
            self._player.begin(wanted.id, turn, wanted.history)
        except QueueFull as error:
            self._post(Refused(wanted.id, str(error), is_busy=True))
        except (P2PDilocoError, ValueError) as error:
            self._post(Refused(wanted.id, str(error), is_busy=False))

    def check(self, wanted: Check) -> None:
        """It comes to its turn: one between two steps of the engine, that nobody waits long."""
        self._checks.append(wanted)

    def cancel(self, number: int) -> None:
        """Unknown numbers are ignored."""
        self._checks = deque(check for check in self._checks if check.id != number)
        if self._player is not None:
            self._player.withdraw(number)

    def policy_changed(self) -> None:
        version = self._engine.version
        if self._player is not None:
            for number in self._player.withdraw_all():
                reason = f"the policy has changed, it is that of step {version} now"
                self._post(Refused(number, reason, is_busy=False))
        self._player = Player(self._engine, self._rulebook(version))

    def take(self, progress: Progress) -> None:
        """What a step of the engine did to a request, perhaps not of a turn."""
        turned = self._player.take(progress) if self._player else None
        if turned is not None:
            self._post(_played(turned))

    def check_next(self) -> None:
        wanted = self._checks.popleft()
        if self._player is None or wanted.step > self._engine.version:
            self._post(Refused(wanted.id, _not_yet(wanted.step), is_busy=True))
            return
        try:
            refusal = self._refusal(wanted, unpack(wanted.episode))
        except (PeerError, ValueError) as error:
            self._post(Checked(wanted.id, str(error)))
        else:
            self._post(Checked(wanted.id, "" if refusal is None else str(refusal)))

    @torch.inference_mode()
    def _refusal(self, wanted: Check, episode: Episode) -> Refusal | None:
        rules = self._rulebook(wanted.step)
        if not wanted.ended:
            resumed = resume(episode, rules)
            refusal = resumed if isinstance(resumed, Refusal) else None
        else:
            refusal = story(episode, rules)
        if refusal is None and wanted.replayed:
            models = {self._engine.version: self._engine.model}
            refusal = replay(episode, rules, models, self._engine.referee.margin)
        return refusal


def _not_yet(step: int) -> str:
    return f"the worker has no policy of step {step} yet; ask again in some seconds"


def _played(turned: Turned) -> Played:
    conversation = turned.conversation
    ended = conversation.episode
    return Played(
        id=turned.number,
        turn=conversation.turn if ended is None else conversation.turn - 1,
        has_ended=ended is not None,
        num_tokens=len(conversation.tokens),
        num_reused=turned.num_reused,
        episode=pack(conversation.so_far() if ended is None else ended),
    )
