"""Turns between nodes, over real loopback sockets, with a worker that plays a part."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgpack
import pytest
from yarl import URL

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.turns import Held, Holding, Load, TurnId
from p2pdiloco_bootstrap.serving import PLAIN_TCP, Traffic, new_application, serving_on_tcp
from p2pdiloco_daemon.exchange import Busy, Refused, Unreachable
from p2pdiloco_daemon.rl import client as rollout_client
from p2pdiloco_daemon.rl import routes as rollout_routes
from p2pdiloco_daemon.rl.client import Workers, asking_workers
from p2pdiloco_daemon.rl.routes import OTHERS_MAX, UNSENT_OTHERS_MAX, RolloutRoutes
from p2pdiloco_daemon.rl.turn_wire import TURNS_PATH, Ask, Withdraw, pack
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.trajectories import HISTORY_BYTES_MAX, RolloutsBusy, TurnRefused

pytestmark = pytest.mark.loopback

PEER = "worker"
TURN = TurnId(5, 2, 0)
HELD = Held(TurnId(5, 2, 1), Holding.READY, 30)
LOAD = Load(
    num_rows=8, cache_tokens=4096, prefill_tokens_per_s=1000.0, token_s=((1, 0.5),), held=(HELD,)
)


class Worker:
    """Plays turns at once, or when `gate` is opened; refuses those of step 4, is busy in step 6."""

    def __init__(self) -> None:
        self.version: int | None = 5
        self.num_unsent = 0
        self.asked: list[tuple[TurnId, bytes]] = []
        self.were_dispatched: list[bool] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = asyncio.Semaphore(0)
        self.withdrawn = asyncio.Semaphore(0)
        self.answer = Played(HELD, 16, b"episode")

    def load(self) -> Load | None:
        return LOAD if self.version is not None else None

    def held(self, step: int, trajectory: int) -> Played | None:
        return self.answer if (step, trajectory) == (5, 2) else None

    async def play(self, turn: TurnId, history: bytes, *, dispatched: bool = True) -> Played:
        self.asked.append((turn, history))
        self.were_dispatched.append(dispatched)
        self.began.release()
        if turn.step == 4:
            raise TurnRefused("it is of another step")
        if turn.step == 6:
            raise RolloutsBusy("no policy of step 6 yet")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.release()
            raise
        held = Held(TurnId(turn.step, turn.trajectory, turn.turn + 1), Holding.READY, 30)
        return Played(held, self.answer.num_reused, self.answer.episode)


@asynccontextmanager
async def serving(worker: Worker | None, dispatcher: str = PLAIN_TCP) -> AsyncIterator[str]:
    """The URL of a node with this worker; who asks here is the dispatcher, unless it is another."""
    app = new_application(1 << 16)
    routes = RolloutRoutes(lambda: worker, Traffic(), dispatcher=lambda: dispatcher)
    routes.add_to(app)
    async with serving_on_tcp(app) as url:
        yield url


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[Workers]:
    async with (
        aiohttp.ClientSession() as session,
        asking_workers(session, Traffic(), lambda _peer, path: URL(url + path)) as workers,
    ):
        yield workers


def run(story: Callable[[Workers, Worker], Awaitable[None]]) -> None:
    async def with_both() -> None:
        worker = Worker()
        async with asyncio.timeout(300), serving(worker) as url, asking(url) as workers:
            await story(workers, worker)

    asyncio.run(with_both())


def test_a_load_comes_with_its_version_and_what_asking_took() -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        heard = await workers.load(PEER)
        assert (heard.version, heard.load) == (5, LOAD)
        assert heard.rtt_s > 0
        worker.version = None
        with pytest.raises(Busy, match="no rollout worker has a policy"):
            await workers.load(PEER)

    run(story)


def test_what_is_held_is_handed_out_and_what_is_not_is_not_there() -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        assert await workers.held(PEER, 5, 2) == worker.answer
        with pytest.raises(Refused, match="404"):
            await workers.held(PEER, 5, 3)

    run(story)


def test_turns_are_played_side_by_side_over_one_connection() -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        history = bytes(range(256)) * 4000
        worker.answer = Played(HELD, 16, history)
        async with asyncio.TaskGroup() as tasks:
            plays = [
                tasks.create_task(workers.play(PEER, TurnId(5, index, 0), history))
                for index in range(20)
            ]
        assert [play.result().held.turn.trajectory for play in plays] == list(range(20))
        assert all(play.result().episode == history for play in plays)
        assert [turn.trajectory for turn, _history in worker.asked] == list(range(20))

    run(story)


def test_a_refused_and_a_busy_turn_raise_what_they_raise_at_home() -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        with pytest.raises(TurnRefused, match="of another step"):
            await workers.play(PEER, TurnId(4, 0, 0), b"")
        with pytest.raises(RolloutsBusy, match="no policy of step 6 yet"):
            await workers.play(PEER, TurnId(6, 0, 0), b"")
        with pytest.raises(TurnRefused, match="bytes"):
            await workers.play(PEER, TURN, bytes(HISTORY_BYTES_MAX + 1))
        assert (await workers.play(PEER, TURN, b"")).episode == b"episode"
        assert all(worker.were_dispatched)

    run(story)


def test_who_does_not_dispatch_gets_some_places_only() -> None:
    async def run_it() -> None:
        worker = Worker()
        worker.gate.clear()
        async with asyncio.timeout(300), serving(worker, "another") as url, asking(url) as workers:
            plays = [
                asyncio.create_task(workers.play(PEER, TurnId(5, i, 0), b""))
                for i in range(OTHERS_MAX)
            ]
            for _ in plays:
                await worker.began.acquire()
            assert worker.were_dispatched == [False] * OTHERS_MAX
            with pytest.raises(RolloutsBusy, match="who do not dispatch"):
                await workers.play(PEER, TurnId(5, OTHERS_MAX, 0), b"")
            worker.gate.set()
            await asyncio.wait(plays)
            assert (await workers.play(PEER, TURN, b"")).episode == b"episode"

    asyncio.run(run_it())


def test_who_does_not_dispatch_may_fill_some_of_the_way_to_the_worker_only() -> None:
    async def run_it() -> None:
        worker = Worker()
        worker.num_unsent = UNSENT_OTHERS_MAX + 1
        async with asyncio.timeout(300):
            async with serving(worker, "another") as url, asking(url) as workers:
                with pytest.raises(RolloutsBusy, match="who do not dispatch"):
                    await workers.play(PEER, TURN, b"")
            async with serving(worker) as url, asking(url) as workers:
                assert (await workers.play(PEER, TURN, b"")).episode == b"episode"

    asyncio.run(run_it())


def test_cancelling_withdraws_one_turn_and_leaves_the_others() -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        worker.gate.clear()
        first = asyncio.create_task(workers.play(PEER, TURN, b""))
        second = asyncio.create_task(workers.play(PEER, TurnId(5, 3, 0), b""))
        await worker.began.acquire()
        await worker.began.acquire()
        first.cancel()
        await worker.withdrawn.acquire()
        worker.gate.set()
        assert (await second).held.turn.trajectory == 3

    run(story)


def test_an_asker_that_goes_away_withdraws_all_its_turns() -> None:
    async def run_it() -> None:
        worker = Worker()
        worker.gate.clear()
        async with asyncio.timeout(300), serving(worker) as url:
            async with asking(url) as workers:
                plays = [
                    asyncio.create_task(workers.play(PEER, TurnId(5, i, 0), b"")) for i in range(3)
                ]
                for _ in plays:
                    await worker.began.acquire()
            for play in plays:
                await worker.withdrawn.acquire()
                with pytest.raises(Unreachable, match="no turns are asked any more"):
                    await play

    asyncio.run(run_it())


def test_a_connection_that_breaks_withdraws_its_turns() -> None:
    async def run_it() -> None:
        worker = Worker()
        worker.gate.clear()
        async with asyncio.timeout(300), serving(worker) as url, aiohttp.ClientSession() as session:
            socket = await session.ws_connect(url + TURNS_PATH)
            await socket.send_bytes(pack(Ask(1, TURN, b"")))
            await worker.began.acquire()
            await session.close()
            await worker.withdrawn.acquire()

    asyncio.run(run_it())


def test_a_worker_that_goes_away_fails_its_turns() -> None:
    async def run_it() -> None:
        worker = Worker()
        worker.gate.clear()
        async with asyncio.timeout(300), AsyncExitStack() as node:
            url = await node.enter_async_context(serving(worker))
            async with asking(url) as workers:
                play = asyncio.create_task(workers.play(PEER, TURN, b""))
                await worker.began.acquire()
                await node.aclose()
                for asked in (play, workers.play(PEER, TURN, b"")):
                    with pytest.raises(Unreachable):
                        await asked

    asyncio.run(run_it())


def test_an_asker_that_does_not_read_holds_up_nobody_who_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_routes, "CLOSE_TIMEOUT_S", 0.05)

    async def run_it() -> None:
        worker = Worker()
        worker.answer = Played(HELD, 16, bytes(HISTORY_BYTES_MAX))
        async with aiohttp.ClientSession() as session, AsyncExitStack() as node:
            url = await node.enter_async_context(serving(worker))
            socket = await session.ws_connect(url + TURNS_PATH)
            connection = socket._response.connection
            assert connection
            assert isinstance(connection.transport, asyncio.Transport)
            connection.transport.pause_reading()
            for number in range(16):
                await socket.send_bytes(pack(Ask(number, TURN, b"")))
                await worker.began.acquire()
            async with asyncio.timeout(300):
                await node.aclose()

    asyncio.run(run_it())


def test_a_worker_without_a_policy_takes_no_turns() -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        worker.version = None
        with pytest.raises(Busy, match="no turns are played"):
            await workers.play(PEER, TURN, b"")

    run(story)


@pytest.mark.parametrize(
    "words",
    [
        b"garbage",
        msgpack.packb({"kind": "ask", "id": 1}),
        msgpack.packb({"kind": "answer", "id": 1}),
        msgpack.packb({"kind": "\u0e01" * 200, "id": 1}),
        pack(Ask(-1, TURN, b"")),
    ],
)
def test_an_asker_that_talks_nonsense_is_hung_up_on(words: bytes) -> None:
    async def run_it() -> None:
        worker = Worker()
        worker.gate.clear()
        async with asyncio.timeout(300), serving(worker) as url, aiohttp.ClientSession() as session:
            async with session.ws_connect(url + TURNS_PATH) as socket:
                await socket.send_bytes(pack(Withdraw(7)))
                await socket.send_bytes(pack(Ask(1, TURN, b"")))
                await socket.send_bytes(words)
                message = await socket.receive()
                assert message.type is aiohttp.WSMsgType.CLOSE
                assert message.data == aiohttp.WSCloseCode.POLICY_VIOLATION
                assert "words of turns" in str(message.extra)
            await worker.withdrawn.acquire()

    asyncio.run(run_it())


@pytest.mark.parametrize(
    "answer",
    [
        Played(Held(TurnId(5, 3, 1), Holding.READY, 30), 0, b""),
        Played(Held(TurnId(5, 2, 2), Holding.READY, 30), 0, b""),
    ],
)
def test_an_answer_to_another_turn_is_against_the_protocol(
    answer: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(workers: Workers, worker: Worker) -> None:
        async def other(turn: TurnId, history: bytes, *, dispatched: bool) -> Played:
            return answer

        monkeypatch.setattr(worker, "play", other)
        with pytest.raises(PeerError, match="was asked for step 5 trajectory 2 turn 0"):
            await workers.play(PEER, TURN, b"")

    run(story)


def test_a_line_without_turns_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_client, "IDLE_S", 0.01)

    async def story(workers: Workers, worker: Worker) -> None:
        await workers.play(PEER, TURN, b"")
        [line] = workers._open
        await asyncio.wait({line})
        assert not workers._lines  # whoever is asked once is not remembered for ever
        assert (await workers.play(PEER, TURN, b"")).episode == b"episode"

    run(story)
