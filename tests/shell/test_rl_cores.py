"""Real cores and dispatchers together: steps are rolled out, shared, learnt from and merged, while
nodes die and come back. Workers and learners play their parts, in virtual time.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import memory_swarm
import numpy as np
import pytest
from memory_swarm import A, B, C, FakeLearner, Living, Network, open_node
from rollout_swarm import (
    GROUP_SIZE,
    INNER_STEPS,
    LIMITS,
    NUM_TRAJECTORIES,
    Peers,
    Worker,
    rulebook,
    step_of,
)
from virtual_clock import run_virtual

from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.protocol import events
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.placement import Rules
from p2pdiloco.protocol.state import NUM_DEPUTIES
from p2pdiloco.rl.episodes import unpack
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.crew import Crew
from p2pdiloco_daemon.rl.dispatcher import Dispatcher
from p2pdiloco_daemon.rl.share_desk import ShareDesk
from p2pdiloco_daemon.rl.swarm_view import SwarmView
from p2pdiloco_daemon.storage.replica import genesis

ALL = list(range(NUM_TRAJECTORIES))


@pytest.fixture(autouse=True)
def one_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's policy is one version of the whole model."""
    fragments = plan_fragments(memory_swarm.SHAPES, 1, {"embedding"})
    ones = tuple(genesis(f.index, np.full(f.size, 1.0, np.float32)) for f in fragments)
    times = SyncTimes(
        inner_steps=INNER_STEPS, num_fragments=1, overlap_steps=1, quorum=1, grace_factor=0.8
    )
    monkeypatch.setattr(memory_swarm, "FRAGMENTS", fragments)
    monkeypatch.setattr(memory_swarm, "GENESIS", ones)
    monkeypatch.setattr(memory_swarm, "TIMES", times)


@dataclass(repr=False)
class ShareLearner(FakeLearner):
    """Makes `INNER_STEPS` steps of each share, and none without one."""

    learnt: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(step, trajectories) of each share that it began with."""
    _shares: deque[tuple[int, tuple[int, ...]]] = field(default_factory=deque)
    _left: int = 0

    def learn(self, step: int, episodes: Sequence[bytes]) -> bool:
        self._shares.append((step, tuple(unpack(data).trajectory for data in episodes)))
        return True

    def _step(self) -> None:
        if not self._left and self._shares:
            self.learnt.append(self._shares.popleft())
            self._left = INNER_STEPS
        if self._left:
            self._left -= 1
            super()._step()


class RlNode:
    def __init__(self, me: PeerId, living: Living, swarm: "RlSwarm") -> None:
        self.me = me
        self.living = living
        self.worker = Worker(turn_s=0.5)
        self.view = SwarmView(living.shell)
        self.learner = ShareLearner(self._on_learner, step_s=0.3)
        self.checker = Checker(
            own=lambda: self.worker, rulebook_of=rulebook, replayed_share=0.1, rng=random.Random(me)
        )
        self.desk = ShareDesk(self.view, GROUP_SIZE, self.checker, lambda: self.learner)
        peers = Peers(me, swarm)
        self.dispatcher = Dispatcher(
            self.view,
            Crew(me, lambda: self.worker, peers),
            self.desk,
            peers,
            step_of,
            Rules(turns_max=LIMITS.turns_max, tokens_max=LIMITS.tokens_max),
            INNER_STEPS,
            self.checker,
        )

    def blame(self, peer: PeerId, reason: str) -> None:
        self.view.blame(peer, reason)

    def heard(self, peer: PeerId) -> None:
        self.dispatcher.heard(peer)

    async def install(self) -> None:
        """The worker takes each version some time after the node has it."""
        self.worker.is_up = False
        while True:
            await asyncio.sleep(0.3)
            if (version := self.view.version) >= 0 and version != self.worker.version:
                self.worker.install(version)
            self.worker.is_up |= version >= 0

    def start(self) -> None:
        living = self.living
        living.shell.learner = self.learner
        living.tasks.create_task(self.learner.run(), name="learner")
        living.tasks.create_task(self.install(), name="worker")
        self.dispatching = living.tasks.create_task(self.dispatcher.run(), name="dispatcher")

    def _on_learner(self, event: learners.LearnerEvent) -> None:
        self.living.shell.on_learner(event)
        if isinstance(event, learners.Ready):
            self.desk.learner_started()


class RlSwarm:
    """Nodes by name; the dead of them are `dead`."""

    def __init__(self, directory: Path) -> None:
        self.network = Network()
        self.nodes: dict[PeerId, RlNode] = {}
        self.dead: set[PeerId] = set()
        self.deaf: set[PeerId] = set()
        self.past: list[RlNode] = []
        """Lives that have ended."""
        self._directory = directory
        self._lives: dict[PeerId, asyncio.Task[None]] = {}

    def start(self, *peers: PeerId) -> None:
        for me in peers:
            self._lives[me] = asyncio.create_task(self._live(me), name=me)

    async def kill(self, *peers: PeerId) -> None:
        for me in peers:
            life = self._lives.pop(me)
            self.dead.add(me)
            self.nodes[me].worker.is_up = False
            self.past.append(self.nodes[me])
            life.cancel()
            await asyncio.wait([life])

    def dispatcher(self) -> PeerId:
        alive = next(node for me, node in self.nodes.items() if me not in self.dead)
        peer = alive.view.dispatcher
        assert peer is not None
        return peer

    async def until(self, what: Callable[[], bool], timeout_s: float = 300.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not what():
                done, _ = await asyncio.wait(self._lives.values(), timeout=0.1)
                for life in done:
                    life.result()

    async def until_version(self, version: int, timeout_s: float = 300.0) -> None:
        await self.until(lambda: self.version() >= version, timeout_s)

    def version(self) -> int:
        return max(
            (n.view.version for me, n in self.nodes.items() if me not in self.dead), default=-1
        )

    def learnt(self, step: int) -> list[int]:
        return sorted(
            trajectory
            for node in {*self.nodes.values(), *self.past}
            for of, share in node.learner.learnt
            if of == step
            for trajectory in share
        )

    async def _live(self, me: PeerId) -> None:
        async with open_node(self.network, self._directory / me, me) as living:
            state = living.node.state
            state.config = replace(state.config, rolls_out=True)
            node = self.nodes[me] = RlNode(me, living, self)
            self.dead.discard(me)
            node.start()
            living.shell.post(events.PeersFound(tuple(PeerId(p) for p in self.network.shelves)))
            await asyncio.Event().wait()


def play(directory: Path, scenario: Callable[[RlSwarm], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        swarm = RlSwarm(directory)
        try:
            await scenario(swarm)
        finally:
            await swarm.kill(*list(swarm._lives))

    run_virtual(main())


def test_versions_follow_each_other_each_from_one_rolled_out_step(tmp_path: Path) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B, C)
        await swarm.until_version(6)
        for step in range(1, 5):
            assert swarm.learnt(step) == ALL
        assert all(node.worker.played and node.learner.learnt for node in swarm.nodes.values())

    play(tmp_path, scenario)


@pytest.mark.parametrize("after_s", [1.0, 2.5, 4.0, 5.5])
def test_a_node_that_dispatches_and_is_killed_is_replaced(tmp_path: Path, after_s: float) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B, C)
        await swarm.until_version(2)
        await asyncio.sleep(after_s)
        dead = swarm.dispatcher()
        await swarm.kill(dead)
        version = swarm.version()
        await swarm.until_version(version + 3)
        swarm.start(dead)
        await swarm.until_version(version + 6)
        assert swarm.nodes[dead].learner.learnt

    play(tmp_path, scenario)


def test_a_lone_node_rolls_out_and_learns_all_by_itself(tmp_path: Path) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A)
        await swarm.until_version(3)
        assert swarm.learnt(1) == ALL

    play(tmp_path, scenario)


def test_a_swarm_that_loses_all_but_one_in_mid_step_goes_on(tmp_path: Path) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B, C)
        await swarm.until_version(2)
        await asyncio.sleep(3.0)
        await swarm.kill(B, C)
        version = swarm.version()
        await swarm.until_version(version + 2)

    play(tmp_path, scenario)


def test_a_joiner_takes_part_within_some_versions(tmp_path: Path) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B)
        await swarm.until_version(2)
        swarm.start(C)
        await swarm.until_version(6)
        assert swarm.nodes[C].worker.played
        assert any(share for _, share in swarm.nodes[C].learner.learnt)

    play(tmp_path, scenario)


def test_a_node_whose_worker_lies_is_found_out_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B, C)
        await swarm.until(lambda: C in swarm.nodes)
        swarm.nodes[C].worker.manner = "other tokens"
        await swarm.until_version(4, 900)
        said = [
            text
            for node in swarm.nodes.values()
            for _, text in node.living.shell.notes
            if f"{C} gave a turn that is not true" in text or f"share of {C} is not true" in text
        ]
        assert said

    play(tmp_path, scenario)


def test_a_node_that_lives_and_does_not_dispatch_is_passed_over(tmp_path: Path) -> None:
    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B, C)
        await swarm.until_version(2)
        lazy = swarm.dispatcher()
        swarm.nodes[lazy].dispatching.cancel()
        version = swarm.version()
        await swarm.until_version(version + 3, 1800)

    play(tmp_path, scenario)


def test_a_member_that_sees_another_attempt_learns_all_the_same(tmp_path: Path) -> None:
    """It lost patience with a slow round that came to its end after all."""

    async def scenario(swarm: RlSwarm) -> None:
        swarm.start(A, B, C)
        num_disagreed = 0
        for step in range(2, 10):
            await swarm.until_version(step)
            dispatcher = swarm.dispatcher()
            others = [node for name, node in swarm.nodes.items() if name != dispatcher]
            num_disagreed += any(sees_another_dispatch(node, dispatcher) for node in others)
            await swarm.until_version(step + 1)
            assert swarm.learnt(step) == ALL
        assert num_disagreed

    play(tmp_path, scenario)


def sees_another_dispatch(node: RlNode, dispatcher: PeerId) -> bool:
    """Moves the node to an attempt in which it is another's turn, neither its own; False if there
    is none near."""
    register = node.living.node.state.registers[0]
    before = register.fence
    _, term, attempt = node.living.node.state.post(register)
    for further in range(1, NUM_DEPUTIES + 1):
        register.fence = (term, attempt + further)
        if node.view.dispatcher not in (dispatcher, node.me):
            return True
    register.fence = before
    return False
