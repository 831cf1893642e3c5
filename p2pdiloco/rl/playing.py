"""Turns of one step's trajectories, played with an engine: a history in, one with a turn more out.

Nothing is kept between two turns but what the engine keeps for itself, the prefixes. So any worker
that is given the history goes on with a trajectory, and the turn comes out the same.

A history is a packed episode so far (`Conversation.so_far`), empty before the first turn. It comes
from a peer: what its policy did not choose must be true (checks.py).
"""

from dataclasses import dataclass, field, replace

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.rl.checks import Refusal, Rulebook, resume
from p2pdiloco.rl.conversation import Conversation
from p2pdiloco.rl.episodes import unpack
from p2pdiloco.rollout.backend import Backend
from p2pdiloco.rollout.request import Progress, Token


@dataclass(slots=True)
class _Playing:
    number: int
    conversation: Conversation
    answer: list[Token] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Turned:
    """A turn is generated, and the environment has acted on it."""

    number: int
    conversation: Conversation
    num_reused: int
    """Of the prompt, tokens that did not have to be computed."""


class Player:
    """Gives the engine the requests of turns, and takes what it says of them."""

    def __init__(self, engine: Backend, rules: Rulebook) -> None:
        self.rules = rules
        self._engine = engine
        self._playing: dict[str, _Playing] = {}
        """By id of the request."""

    def begin(self, number: int, turn: TurnId, history: bytes) -> None:
        """Begins a turn, called by `number` from here on, here and in the engine: no two turns may
        have the same, nor a turn that is wanted again the one that it had. PeerError or ValueError
        if it cannot be, `QueueFull` if it cannot be now."""
        conversation = self._conversation(turn, history)
        if conversation.turn != turn.turn:
            raise PeerError(f"the history of {turn} has {conversation.turn} turns")
        request = replace(conversation.request(), id=str(number))
        self._engine.submit(request)
        self._playing[request.id] = _Playing(number, conversation)

    def withdraw(self, number: int) -> None:
        """Ends a turn, and what the engine has of it; not an error if it has ended."""
        if self._playing.pop(str(number), None):
            self._engine.cancel(str(number))

    def withdraw_all(self) -> list[int]:
        """Ends all turns; says which."""
        numbers = [playing.number for playing in self._playing.values()]
        for number in numbers:
            self.withdraw(number)
        return numbers

    def take(self, progress: Progress) -> Turned | None:
        """A step's news of one request, of others too; the turn that it completes."""
        playing = self._playing.get(progress.id)
        if playing is None:
            return None
        playing.answer += progress.tokens
        if progress.finish is None:
            return None
        del self._playing[progress.id]
        playing.conversation.answered(playing.answer)
        return Turned(playing.number, playing.conversation, progress.num_reused)

    def _conversation(self, turn: TurnId, history: bytes) -> Conversation:
        tasks = self.rules.tasks
        if turn.step != tasks.step or turn.trajectory >= tasks.num_trajectories:
            raise PeerError(
                f"{turn} is none of step {tasks.step}, which has {tasks.num_trajectories}"
                " trajectories"
            )
        if not history:
            return self.rules.conversation(turn.trajectory)
        episode = unpack(history)
        if episode.trajectory != turn.trajectory:
            raise PeerError(f"the history of {turn} is of trajectory {episode.trajectory}")
        resumed = resume(episode, self.rules)
        if isinstance(resumed, Refusal):
            raise PeerError(f"the history of {turn} is not true: {resumed}")
        return resumed
