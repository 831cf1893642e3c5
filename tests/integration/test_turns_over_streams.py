"""Turns between two real hosts: the websocket goes over a libp2p stream like everything else."""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from p2pdiloco.protocol.turns import Held, Holding, Load, TurnId
from p2pdiloco_bootstrap.host import HostOptions, open_host
from p2pdiloco_bootstrap.serving import Traffic, new_application
from p2pdiloco_daemon.exchange import Unreachable
from p2pdiloco_daemon.rl.client import asking_workers
from p2pdiloco_daemon.rl.routes import RolloutRoutes
from p2pdiloco_daemon.rollouts.held_turns import Played

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(600)]

HISTORY = bytes(range(256)) * 1000
NUM_TURNS = 40
"""More than the streams that a peer is served at once."""


class Worker:
    """Answers a turn with its history once all are there; those of step 6 never."""

    version = 5
    num_unsent = 0

    def __init__(self) -> None:
        self._all_asked = asyncio.Event()
        self._num_asked = 0
        self.hangs, self.withdrawn = asyncio.Event(), asyncio.Event()

    def load(self) -> Load:
        return Load(
            num_rows=1, cache_tokens=1, prefill_tokens_per_s=1.0, token_s=((1, 0.5),), held=()
        )

    def held(self, step: int, trajectory: int) -> None:
        return None

    async def play(self, turn: TurnId, history: bytes, *, dispatched: bool = True) -> Played:
        self._num_asked += 1
        if self._num_asked == NUM_TURNS:
            self._all_asked.set()
        if turn.step == 6:
            await self._never()
        await self._all_asked.wait()
        held = Held(TurnId(turn.step, turn.trajectory, turn.turn + 1), Holding.READY, 9)
        return Played(held, 0, history)

    async def _never(self) -> None:
        self.hangs.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.withdrawn.set()


def test_many_turns_go_over_one_stream_and_end_with_it() -> None:
    async def run(directory: Path) -> None:
        async with asyncio.timeout(400), AsyncExitStack() as stack:
            first = HostOptions(identity_path=directory / "a.key", listen=("127.0.0.1", 0))
            serving = await stack.enter_async_context(open_host(first))
            second = HostOptions(
                identity_path=directory / "b.key",
                listen=("127.0.0.1", 0),
                bootstraps=tuple(await serving.addresses()),
            )
            asking = await stack.enter_async_context(open_host(second))
            worker, app = Worker(), new_application(1 << 16)
            routes = RolloutRoutes(lambda: worker, Traffic(), lambda: asking.peer_id)
            routes.add_to(app)
            await stack.enter_async_context(serving.serving(app))
            peer = serving.peer_id
            async with asking_workers(asking.session(), Traffic()) as workers:
                assert (await workers.load(peer)).version == 5
                async with asyncio.TaskGroup() as tasks:
                    plays = [
                        tasks.create_task(workers.play(peer, TurnId(5, i, 0), HISTORY))
                        for i in range(NUM_TURNS)
                    ]
                assert all(play.result().episode == HISTORY for play in plays)
                last = asyncio.create_task(workers.play(peer, TurnId(6, 0, 0), b""))
                await worker.hangs.wait()
            await worker.withdrawn.wait()
            with pytest.raises(Unreachable):
                await last

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))
