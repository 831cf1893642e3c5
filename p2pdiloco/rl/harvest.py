"""What a dispatcher has of a step: of each trajectory the episode so far, and who gave which turn.

Episodes stay packed: they are many, and go out as they came. Not here: whether they are true
(`checks.py`), and what is generated next (`protocol/placement.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.turns import Step, TurnId
from p2pdiloco.rl.episodes import Episode, pack, unpack


@dataclass(frozen=True, slots=True)
class Grown:
    """An episode with one turn more, as a worker gave it; `data` is its packed form."""

    episode: Episode
    data: bytes
    is_ended: bool

    @property
    def num_turns(self) -> int:
        return len(self.episode.answers)

    @property
    def num_tokens(self) -> int:
        return len(self.episode.tokens)


@dataclass(slots=True)
class _Stalk:
    """Of one trajectory. `givers` has one entry for each turn in `data`, None where only an earlier
    dispatcher knew."""

    data: bytes = b""
    num_tokens: int = 0
    givers: list[PeerId | None] = field(default_factory=list)
    holder: PeerId | None = None
    is_ended: bool = False


class Harvest:
    """`take` and `revoke` change it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._stalks = [_Stalk() for _ in range(step.num_trajectories)]

    def history(self, turn: TurnId) -> bytes | None:
        """The packed episode before this turn, empty before the first; None if this is not the turn
        that is next."""
        stalk = self._stalks[turn.trajectory]
        is_next = len(stalk.givers) == turn.turn and not stalk.is_ended
        return stalk.data if is_next else None

    def holder(self, trajectory: int) -> PeerId | None:
        """Whose worker has all of it most likely, if anybody's has."""
        return self._stalks[trajectory].holder

    def givers(self, trajectory: int) -> Sequence[PeerId | None]:
        """Of its turns; None for those that were `found`."""
        return tuple(self._stalks[trajectory].givers)

    def take(self, grown: Grown, giver: PeerId) -> bool:
        """False if it is not what comes next: another was quicker, or it was revoked."""
        stalk = self._stalks[grown.episode.trajectory]
        if stalk.is_ended or len(stalk.givers) != grown.num_turns - 1:
            return False
        self._put(stalk, grown, [*stalk.givers, giver], giver)
        return True

    def found(self, grown: Grown, holder: PeerId) -> None:
        """What a worker holds of it, from an earlier dispatcher: all of its turns at once. Others
        may have given some of them."""
        self._put(self._stalks[grown.episode.trajectory], grown, [None] * grown.num_turns, holder)

    def revoke(self, giver: PeerId | None) -> Iterator[tuple[TurnId, int]]:
        """Forgets every turn of this giver, or all that were found, and all that came after it.
        Gives for each trajectory the turn that is next now, and the tokens before it."""
        for trajectory, stalk in enumerate(self._stalks):
            if giver not in stalk.givers:
                continue
            num_left = stalk.givers.index(giver)
            stalk.is_ended, stalk.holder = False, None
            stalk.givers = stalk.givers[:num_left]
            if num_left:
                left = until(unpack(stalk.data), num_left)
                stalk.data, stalk.num_tokens = pack(left), len(left.tokens)
            else:
                group = trajectory // self._step.group_size
                stalk.data, stalk.num_tokens = b"", self._step.prompt_tokens[group]
            yield TurnId(self._step.number, trajectory, num_left), stalk.num_tokens

    def ended(self) -> dict[int, list[bytes]]:
        """Of each group that has any, the episodes that have ended."""
        groups: dict[int, list[bytes]] = {}
        for trajectory, stalk in enumerate(self._stalks):
            if stalk.is_ended:
                groups.setdefault(trajectory // self._step.group_size, []).append(stalk.data)
        return groups

    @staticmethod
    def _put(stalk: _Stalk, grown: Grown, givers: list[PeerId | None], holder: PeerId) -> None:
        stalk.data, stalk.num_tokens, stalk.holder = grown.data, grown.num_tokens, holder
        stalk.givers, stalk.is_ended = givers, grown.is_ended


def grown(history: bytes, data: bytes, turn: TurnId, *, is_ended: bool) -> Grown:
    """The episode that answers `turn`, with `history` before it. PeerError if it is another."""
    episode = unpack(data)
    if (episode.step, episode.trajectory, len(episode.answers)) != (
        turn.step,
        turn.trajectory,
        turn.turn + 1,
    ):
        raise PeerError(
            f"asked for {turn}, got {len(episode.answers)} turns of trajectory"
            f" {episode.trajectory} of step {episode.step}"
        )
    if history:
        before = unpack(history)
        begins = until(episode, turn.turn)
        if (begins.tokens, begins.answers) != (before.tokens, before.answers):
            raise PeerError(f"the answer to {turn} does not begin with what was before it")
    return Grown(episode, data, is_ended)


def until(episode: Episode, num_turns: int) -> Episode:
    """As it was handed on after so many turns, at least one: the environment's words to the last of
    them included."""
    if num_turns == len(episode.answers):
        return episode
    return replace(
        episode,
        tokens=episode.tokens[: episode.answers[num_turns].start],
        answers=episode.answers[:num_turns],
        reward=0.0,
        is_cut=False,
    )
