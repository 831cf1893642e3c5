"""One dispatcher and its peers over real loopback sockets: routes, websockets and shares as nodes
have them, workers that play a part."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import aiohttp
from aiohttp import web
from rollout_swarm import (
    ANNA,
    BERT,
    CLEO,
    GROUP_SIZE,
    INNER_STEPS,
    LIMITS,
    NUM_TRAJECTORIES,
    Worker,
    rulebook,
    step_of,
)
from yarl import URL

from p2pdiloco.protocol.dealing import Learner
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Rules
from p2pdiloco.rl.episodes import unpack
from p2pdiloco_bootstrap.serving import PLAIN_TCP, Traffic, new_application, serving_on_tcp
from p2pdiloco_daemon.exchange import Exchange
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.client import Heard, Workers, asking_workers
from p2pdiloco_daemon.rl.crew import Crew
from p2pdiloco_daemon.rl.dispatcher import Dispatcher
from p2pdiloco_daemon.rl.routes import RolloutRoutes
from p2pdiloco_daemon.rl.share_desk import ShareDesk
from p2pdiloco_daemon.rl.turn_wire import LOAD_PATH, TURNS_PATH, LoadReport, pack

ALL = list(range(NUM_TRAJECTORIES))


class Member:
    """A peer as the dispatcher meets it, or the dispatcher itself."""

    def __init__(self, name: PeerId, dispatcher: PeerId) -> None:
        self.me = name
        self.version = 0
        self.head: str | None = "ours"
        self.dispatcher: PeerId | None = dispatcher
        self.worker = Worker(turn_s=0.02)
        self.learnt: list[int] = []
        self.blamed: list[PeerId] = []
        self.notes: list[str] = []
        self.names: list[PeerId] = []
        self.checker = Checker(
            own=lambda: self.worker,
            rulebook_of=rulebook,
            replayed_share=0.2,
            rng=random.Random(name),
        )
        self.desk = ShareDesk(self, GROUP_SIZE, self.checker, lambda: self)

    def may_dispatch(self, peer: PeerId) -> bool:
        return peer == self.dispatcher

    def workers(self) -> Sequence[PeerId]:
        return self.names

    def learners(self) -> Mapping[PeerId, Learner]:
        return dict.fromkeys(self.names, Learner(1, 0, True))

    def blame(self, peer: PeerId, reason: str) -> None:
        self.blamed.append(peer)

    def pass_over(self, reason: str) -> None:
        raise AssertionError(reason)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def learn(self, step: int, episodes: Sequence[bytes]) -> bool:
        self.learnt += [unpack(data).trajectory for data in episodes]
        return True


def served(member: Member) -> web.Application:
    app = new_application(1 << 16)
    RolloutRoutes(lambda: member.worker, Traffic(), lambda: PLAIN_TCP).add_to(app)
    member.desk.add_to(app.router)
    return app


def hostile(turns: Callable[[web.WebSocketResponse], Awaitable[None]]) -> web.Application:
    """Says that it is well, and does `turns` to whoever asks it for one."""

    async def load(request: web.Request) -> web.StreamResponse:
        said = Worker(turn_s=0.02).load()
        assert said is not None
        return web.Response(body=pack(LoadReport(0, said)))

    async def answer(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await turns(socket)
        return socket

    app = new_application(1 << 16)
    app.router.add_get(LOAD_PATH, load)
    app.router.add_get(TURNS_PATH, answer)
    return app


class Near:
    """Peers as near as one's own worker, however busy the machine was when they were asked how they
    are: else work could be placed around one of them.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.play, self.held = workers.play, workers.held

    async def load(self, peer: str) -> Heard:
        return replace(await self._workers.load(peer), rtt_s=0.0)


@asynccontextmanager
async def dispatching(apps: Mapping[PeerId, web.Application]) -> AsyncIterator[Member]:
    """Anna, who dispatches, with these peers."""
    anna = Member(ANNA, ANNA)
    anna.names = [ANNA, *apps]
    async with AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(serving_on_tcp(apps[name])) for name in apps}

        def url(peer: str, path: str) -> URL:
            return URL(urls[PeerId(peer)]) / path.lstrip("/")

        session = await stack.enter_async_context(aiohttp.ClientSession())
        workers = await stack.enter_async_context(asking_workers(session, Traffic(), url))
        dispatcher = Dispatcher(
            anna,
            Crew(ANNA, lambda: anna.worker, Near(workers)),
            anna.desk,
            Exchange(session, Traffic(), url),
            step_of,
            Rules(turns_max=LIMITS.turns_max, tokens_max=LIMITS.tokens_max),
            INNER_STEPS,
            anna.checker,
        )
        running = asyncio.create_task(dispatcher.run())
        try:
            yield anna
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_step_is_rolled_out_by_all_and_each_learns_its_share() -> None:
    async def script() -> None:
        members = [Member(name, PeerId(PLAIN_TCP)) for name in (BERT, CLEO)]
        async with dispatching({m.me: served(m) for m in members}) as anna:
            await until(lambda: len(anna.learnt) + sum(len(m.learnt) for m in members) >= len(ALL))
            learnt = [*anna.learnt, *members[0].learnt, *members[1].learnt]
            assert sorted(learnt) == ALL
            assert all(member.learnt and member.worker.played for member in members)
            assert not [note for m in (anna, *members) for note in m.notes]

    asyncio.run(script())


def test_a_peer_that_answers_with_rubbish_is_named_and_the_step_goes_on() -> None:
    async def rubbish(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(b"rubbish")

    async def script() -> None:
        bert = Member(BERT, PeerId(PLAIN_TCP))
        async with dispatching({BERT: served(bert), CLEO: hostile(rubbish)}) as anna:
            await until(lambda: len(anna.learnt) + len(bert.learnt) >= 2 * GROUP_SIZE)
            assert any("cleo gave a turn that is not true" in note for note in anna.notes)

    asyncio.run(script())


def test_a_peer_that_hangs_up_at_every_turn_does_not_keep_the_others() -> None:
    async def hang_up(socket: web.WebSocketResponse) -> None:
        await socket.close()

    async def script() -> None:
        bert = Member(BERT, PeerId(PLAIN_TCP))
        async with dispatching({BERT: served(bert), CLEO: hostile(hang_up)}) as anna:
            await until(lambda: len(anna.learnt) + len(bert.learnt) >= 2 * GROUP_SIZE)

    asyncio.run(script())


def test_a_load_that_never_ends_is_not_waited_for() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(1000))
            await asyncio.sleep(0.01)

    async def script() -> None:
        bert = Member(BERT, PeerId(PLAIN_TCP))
        app = new_application(1 << 16)
        app.router.add_get(LOAD_PATH, endless)
        async with dispatching({BERT: served(bert), CLEO: app}) as anna:
            await until(lambda: len(anna.learnt) + len(bert.learnt) >= 2 * GROUP_SIZE)

    asyncio.run(script())
