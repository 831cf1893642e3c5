"""What a learner still has to learn from: shares of steps, each cut into the H parts of H inner
steps.

A share of step s is rolled out with version s of the model and learnt from by a learner that stands
on version s, or up to `lag_max` versions later; it waits for a learner that is not there yet, and
what is left of an older one is dropped. Whatever a share is worth, it makes H steps: a part whose
rewards are all alike, which teaches nothing, is one too, and so are those of a share without
episodes; else a swarm that has nothing to learn from would wait for ever for its next merge.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.losses import Variant
from p2pdiloco.rl.packing import Weighted, select
from p2pdiloco.rl.step import Gradient

SHARES_MAX = 8
"""That wait; the oldest gives way. More come only if a dispatcher repeats itself."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What became of a share."""

    step: int
    num_episodes: int
    num_learnt_from: int
    """Those that a gradient was made of."""
    num_dropped: int
    """Those that were too old when their turn came."""
    reward: float
    """Mean of all its episodes."""
    drift: float
    """How far the policy was from the one that generated what it learnt from (losses.py)."""
    loss: float
    """Mean of its gradients'."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one inner step is made of."""

    chosen: Sequence[Weighted]
    alike: Sequence[Episode]
    """Of groups without differences: nothing is learnt from them."""

    @property
    def num_tokens(self) -> int:
        """Generated ones."""
        episodes = [*(weighted.episode for weighted in self.chosen), *self.alike]
        return sum(episode.num_generated for episode in episodes)


@dataclass(slots=True, eq=False)
class _Share:
    step: int
    episodes: Sequence[Episode]
    parts: deque[Part] | None = None
    """None before its first step."""
    gradients: list[Gradient] = field(default_factory=list)
    num_learnt_from: int = 0
    num_stepped: int = 0
    """Episodes whose parts were a step."""

    def lesson(self) -> Lesson:
        num_tokens = sum(gradient.num_tokens for gradient in self.gradients)
        drifts = sum(gradient.drift * gradient.num_tokens for gradient in self.gradients)
        losses = [gradient.loss for gradient in self.gradients]
        return Lesson(
            step=self.step,
            num_episodes=len(self.episodes),
            num_learnt_from=self.num_learnt_from,
            num_dropped=len(self.episodes) - self.num_stepped,
            reward=fmean(episode.reward for episode in self.episodes),
            drift=drifts / max(1, num_tokens),
            loss=fmean(losses) if losses else 0.0,
        )


class Shares:
    """In the order in which they came. `inner_steps` are H."""

    def __init__(self, inner_steps: int, group_size: int, lag_max: int, variant: Variant) -> None:
        self._inner_steps = inner_steps
        self._group_size = group_size
        self._lag_max = lag_max
        self._variant: Variant = variant
        self._version: int | None = None
        self._shares: deque[_Share] = deque()
        self._taken: dict[int, set[int]] = {}
        """Trajectories of each step that came before: who repeats itself teaches nothing twice."""
        self._ended: list[_Share] = []

    def add(self, step: int, episodes: Iterable[Episode]) -> None:
        """A share, or another one of the same step. What came before is left out."""
        share, taken = list(episodes), self._taken.setdefault(step, set())
        new = [episode for episode in share if episode.trajectory not in taken]
        taken.update(episode.trajectory for episode in new)
        if share and not new:
            return
        self._shares.append(_Share(step, new))
        if len(self._shares) > SHARES_MAX:
            self._ended.append(self._shares.popleft())
        self._drop_old()

    def stand_on(self, version: int) -> None:
        """The learner has received this version of the model."""
        self._version = version
        self._drop_old()

    @property
    def version(self) -> int | None:
        """Of the model, that the learner received last."""
        return self._version

    @property
    def has_part(self) -> bool:
        return self._next() is not None

    def take(self) -> Part:
        """The next part; `learnt` follows."""
        share = self._next()
        assert share and self._version is not None, "there is no part"
        if share.parts is None:
            share.parts = deque(self._cut(share, self._version))
        return share.parts.popleft()

    def learnt(self, part: Part, gradient: Gradient | None) -> None:
        """What became of the part that was taken; None if nothing was learnt."""
        share = self._next()
        assert share and share.parts is not None, "no part was taken"
        share.num_stepped += len(part.chosen) + len(part.alike)
        if gradient:
            share.gradients.append(gradient)
            share.num_learnt_from += len(part.chosen)
        if not share.parts:
            self._shares.remove(share)
            self._ended.append(share)

    def take_ended(self) -> list[Lesson]:
        """Of the shares with episodes that ended since this was asked last."""
        ended, self._ended = self._ended, []
        return [share.lesson() for share in ended if share.episodes]

    def _next(self) -> _Share | None:
        version = self._version
        if version is None:
            return None
        return next((share for share in self._shares if share.step <= version), None)

    def _drop_old(self) -> None:
        if self._version is None:
            return
        oldest = self._version - self._lag_max
        self._ended += [share for share in self._shares if share.step < oldest]
        self._shares = deque(share for share in self._shares if share.step >= oldest)
        self._taken = {step: taken for step, taken in self._taken.items() if step >= oldest}

    def _cut(self, share: _Share, version: int) -> Iterator[Part]:
        """H parts, each with some of every group that has H episodes."""
        selection = select(self._groups(share), version, self._lag_max, self._variant)
        for first in range(self._inner_steps):
            dealt = slice(first, None, self._inner_steps)
            yield Part(selection.chosen[dealt], selection.alike[dealt])

    def _groups(self, share: _Share) -> Iterator[list[Episode]]:
        ordered = sorted(share.episodes, key=lambda episode: episode.trajectory)
        for _, group in groupby(ordered, key=lambda e: e.trajectory // self._group_size):
            yield list(group)
