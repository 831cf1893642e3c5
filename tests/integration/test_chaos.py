"""Twenty episodes of chaos for one swarm of real daemons; see `benchmarks.chaos`.

Each seed kills, stops, cuts off and starves nodes, then waits until all is well again. A seed that
fails says what it did; `python -m benchmarks.chaos --seed N` does the same again.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from forked import shared_forkserver

from benchmarks.chaos import NUM_NODES, START_S, play, settle_and_leave
from benchmarks.chaos_faults import FAULTS_MAX, RESTARTS, Kind, draw
from benchmarks.chaos_swarm import ChaosSwarm, running_chaos_swarm
from benchmarks.chaos_watch import Watch
from p2pdiloco_daemon.children.forkserver import Forkserver

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(2400)]

T = TypeVar("T")

SEEDS = range(20)


class Living:
    """A swarm that lives in a thread of its own from test to test."""

    def __init__(self, forkserver: Forkserver | None) -> None:
        self.is_broken = False
        self._forkserver = forkserver
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._problem: BaseException | None = None
        self._parts: tuple[ChaosSwarm, Watch] | None = None
        self._thread = threading.Thread(target=self._run, name="chaos")

    def __enter__(self) -> "Living":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()
        if self._problem:
            raise self._problem

    def call(self, work: Callable[[ChaosSwarm, Watch], Coroutine[Any, Any, T]]) -> T:
        """The result of `work` with the swarm."""
        if self.is_broken or self._parts is None:
            pytest.fail("the swarm did not survive what came before")
        self.is_broken = True
        result = asyncio.run_coroutine_threadsafe(work(*self._parts), self._loop).result()
        self.is_broken = False
        return result

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as problem:  # raised by whoever waits for this thread
            self._problem = problem
        finally:
            self._ready.set()

    async def _live(self) -> None:
        async with running_chaos_swarm(NUM_NODES, forkserver=self._forkserver) as swarm:
            watch = Watch(swarm)
            await watch.heals({}, START_S)
            self._parts = swarm, watch
            self._ready.set()
            await self._end.wait()


@pytest.fixture(scope="module")
def living() -> Iterator[Living]:
    with Living(shared_forkserver()) as swarm:
        yield swarm


@pytest.mark.parametrize("seed", SEEDS)
def test_the_swarm_survives(living: Living, seed: int) -> None:
    episode = living.call(lambda swarm, watch: play(swarm, watch, seed))
    assert [*episode.faults, *episode.left_out]


def test_in_the_end_all_agree_and_leave_nothing_behind(living: Living) -> None:
    living.call(settle_and_leave)


# -------------------------------------------------------------------- the draw


NAMES = [f"node-{number}" for number in range(1, NUM_NODES + 1)]


def test_a_seed_draws_the_same_faults_again() -> None:
    assert draw(7, NAMES) == draw(7, NAMES)
    assert len({draw(seed, NAMES) for seed in range(100)}) == 100


def test_the_seeds_of_this_test_have_every_kind_of_fault() -> None:
    assert {fault.kind for seed in SEEDS for fault in draw(seed, NAMES)} == set(Kind)


def test_no_node_has_two_faults_at_once_and_one_is_spared_unless_all_are_killed() -> None:
    for seed in range(200):
        faults = draw(seed, NAMES)
        struck = [name for fault in faults for name in fault.nodes]
        assert len(struck) == len(set(struck))
        assert len(faults) <= FAULTS_MAX
        assert sum(fault.kind in RESTARTS for fault in faults) <= 1
        assert len(struck) < NUM_NODES or [f.kind for f in faults] == [Kind.KILL_ALL]
