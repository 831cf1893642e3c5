"""Looks through what peers say that they generated, with this node's own rollout worker.

While the worker is being started again, what needs no model is checked without it: a node whose
worker is down holds nobody up, and a lie in a token that it misses, others find.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from p2pdiloco.rl.checks import Refusal, Rulebook, resume, story
from p2pdiloco.rl.episodes import unpack
from p2pdiloco_daemon.rl.crew import OwnWorker
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy

PATIENCE_S = 5.0
"""For the worker to have the policy of the step: it takes each version at once."""
RETRY_S = 0.5
HUNG_S = 120.0
"""For each episode; a worker that has not looked through them by then counts as down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker:
    """`own` gives the worker, None while there is none; `rng` is this node's secret."""

    own: Callable[[], OwnWorker | None]
    rulebook_of: Callable[[int], Rulebook]
    replayed_share: float
    rng: random.Random

    def closely(self) -> "Checker":
        """One that looks at all tokens."""
        return replace(self, replayed_share=1.0)

    def draw(self) -> bool:
        """Whether to look at an episode's tokens, too."""
        return self.rng.random() < self.replayed_share

    async def refusals(
        self, step: int, episodes: Sequence[bytes], replayed: Collection[int], *, ended: bool
    ) -> Sequence[str | None]:
        """What is wrong with each of these well-formed episodes, or episodes so far."""
        give_up_at = asyncio.get_running_loop().time() + PATIENCE_S
        while (own := self.own()) and own.load():
            try:
                async with asyncio.timeout(HUNG_S * max(1, len(episodes))):
                    return await own.check(step, episodes, replayed, ended=ended)
            except TimeoutError:
                break
            except RolloutsBusy:
                if asyncio.get_running_loop().time() >= give_up_at:
                    break
            await asyncio.sleep(RETRY_S)
        return await asyncio.to_thread(self._stories, step, episodes, ended)

    def _stories(self, step: int, episodes: Sequence[bytes], ended: bool) -> Sequence[str | None]:
        rules = self.rulebook_of(step)
        return [_refusal(data, rules, ended) for data in episodes]


def _refusal(data: bytes, rules: Rulebook, ended: bool) -> str | None:
    check = story if ended else resume
    refusal = check(unpack(data), rules)
    return str(refusal) if isinstance(refusal, Refusal) else None
