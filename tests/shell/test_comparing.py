"""How far partners are from each other in what they predict, as a node tells it."""

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
from memory_swarm import A, B, mixing_of, open_holdings
from virtual_clock import run_virtual

from p2pdiloco.learn.predictions import BUCKETS, POSITIONS, pack_predictions
from p2pdiloco_daemon.gossip import COMPARE_S, GossipErrands
from p2pdiloco_daemon.learner import learner as learners


def sure_of(token: int) -> bytes:
    """Predictions that are certain of one token."""
    told = np.zeros((POSITIONS, BUCKETS), np.float32)
    told[:, token] = 1.0
    return pack_predictions(told)


class Partner:
    def __init__(self) -> None:
        self.told = sure_of(1)

    async def predictions(self, peer: str) -> bytes:
        return self.told


def test_the_curve_has_a_point_for_each_comparison_that_says_something_new(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_holdings(tmp_path) as holdings:
            partner, nobody = Partner(), cast("Any", None)
            mixing, expected = mixing_of(holdings, A), (OSError,)
            errands = GossipErrands(nobody, mixing, holdings, cast("Any", partner), expected)
            comparing = asyncio.create_task(errands.compare(lambda: [B]))
            await asyncio.sleep(COMPARE_S / 2)  # between two comparisons
            for step, mine, theirs in ((10, 1, 1), (20, 1, 1), (30, 1, 2), (40, 2, 2), (50, 2, 2)):
                partner.told = sure_of(theirs)
                errands.on_learner(
                    learners.StepsDone(step, steps=1, tokens=1, step_s=1, stall_s=0, loss=1)
                )
                errands.on_learner(learners.Evaluated(1.0, step, 0.1, sure_of(mine)))
                await asyncio.sleep(COMPARE_S)
            comparing.cancel()
            assert errands.output_distances.points() == ((10, 0.0), (30, 1.0), (40, 0.0))

    run_virtual(main())
