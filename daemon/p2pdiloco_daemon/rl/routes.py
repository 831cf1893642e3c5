"""What a node's rollout worker does for others: the routes, and the websocket of turns.

    GET /v1/rollouts/load                          -> LoadReport; 503 while there is no policy
    GET /v1/rollouts/held/{step}/{trajectory}      -> Answer, of what the dispatcher had played
                                                      last; 404
    GET /v1/rollouts/turns                         a websocket: see `turn_wire`; 503 as above

All are added to the application that the node serves to its peers, with its limits on requests.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import aiohttp
from aiohttp import web

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import sentence
from p2pdiloco.protocol.turns import Load, TurnId
from p2pdiloco_bootstrap.serving import Traffic, send_body, sender
from p2pdiloco_daemon.rl.turn_wire import (
    FRAME_BYTES_MAX,
    LOAD_PATH,
    TURNS_PATH,
    Answer,
    Answered,
    Ask,
    LoadReport,
    Refusal,
    Withdraw,
    pack,
    unpack_asked,
)
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.trajectories import (
    TURNS_MAX,
    UNSENT_BYTES_MAX,
    RolloutsBusy,
    TurnRefused,
)

HEARTBEAT_S = 20.0
"""Between pings; an asker that leaves one unanswered for half of it has gone."""
WRITE_TIMEOUT_S = 30.0
"""For an answer to leave."""
REASON_BYTES_MAX = 123
"""Of the frame that closes a websocket (RFC 6455, 5.5)."""
CLOSE_TIMEOUT_S = 2.0
"""For the last words; the connection of a peer that does not read them is cut."""
OTHERS_MAX = TURNS_MAX // 4
"""Turns for all who are not the dispatcher in our eyes: nodes may differ about who is for a moment,
but nobody is to keep the dispatcher from a worker."""
UNSENT_OTHERS_MAX = UNSENT_BYTES_MAX // 4
"""Of what waits for the worker to read it: turns that are withdrawn free their places at once."""
_KIND = "rollouts"
"""Of the bytes in `Traffic`."""


class ServedWorker(Protocol):
    """Of a `p2pdiloco_daemon.rollouts.worker.Rollouts`, what is asked here."""

    @property
    def version(self) -> int | None: ...
    @property
    def num_unsent(self) -> int: ...
    def load(self) -> Load | None: ...
    def held(self, step: int, trajectory: int) -> Played | None: ...
    async def play(self, turn: TurnId, history: bytes, *, dispatched: bool = True) -> Played: ...


class RolloutRoutes:
    """`rollouts` gives the node's worker, or None while there is none; `dispatcher` whose step it
    is in the eyes of this node."""

    def __init__(
        self,
        rollouts: Callable[[], ServedWorker | None],
        traffic: Traffic,
        dispatcher: Callable[[], str | None],
    ) -> None:
        self._rollouts = rollouts
        self._traffic = traffic
        self._dispatcher = dispatcher
        self._num_others = 0
        """Turns in work that others than the dispatcher asked for."""
        self._open: set[_Desk] = set()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(LOAD_PATH, self.load)
        app.router.add_get(r"/v1/rollouts/held/{step:\d{1,16}}/{trajectory:\d{1,16}}", self.held)
        app.router.add_get(TURNS_PATH, self.turns)
        app.on_shutdown.append(self._close)

    async def load(self, request: web.Request) -> web.StreamResponse:
        rollouts, load = self._serving()
        assert rollouts.version is not None
        body = pack(LoadReport(rollouts.version, load))
        return await send_body(request, body, _KIND, self._traffic)

    async def held(self, request: web.Request) -> web.StreamResponse:
        rollouts, _load = self._serving()
        place = request.match_info
        played = rollouts.held(int(place["step"]), int(place["trajectory"]))
        if played is None:
            raise web.HTTPNotFound(text="nothing is held of this trajectory")
        return await send_body(request, pack(_answer(0, played)), _KIND, self._traffic)

    async def turns(self, request: web.Request) -> web.StreamResponse:
        rollouts, _load = self._serving()
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=FRAME_BYTES_MAX, compress=False
        )
        await socket.prepare(request)
        async with asyncio.TaskGroup() as plays:
            place = partial(self._place, sender())
            desk = _Desk(request, socket, rollouts, self._traffic, plays, place)
            self._open.add(desk)
            try:
                await desk.listen()
            finally:
                self._open.remove(desk)
                desk.withdraw_all()
        return socket

    @contextmanager
    def _place(self, asker: str) -> Iterator[bool]:
        """For a turn of an asker; whether it is the dispatcher. RolloutsBusy if there is none."""
        if asker == self._dispatcher():
            yield True
            return
        rollouts = self._rollouts()
        num_unsent = rollouts.num_unsent if rollouts else 0
        if self._num_others >= OTHERS_MAX or num_unsent > UNSENT_OTHERS_MAX:
            raise RolloutsBusy("too many ask for turns who do not dispatch them; ask again later")
        self._num_others += 1
        try:
            yield False
        finally:
            self._num_others -= 1

    def _serving(self) -> tuple[ServedWorker, Load]:
        rollouts = self._rollouts()
        load = rollouts.load() if rollouts else None
        if rollouts is None or load is None:
            raise web.HTTPServiceUnavailable(text="no rollout worker has a policy here")
        return rollouts, load

    async def _close(self, _app: web.Application) -> None:
        async with asyncio.TaskGroup() as closing:
            for desk in self._open:
                closing.create_task(desk.hang_up(aiohttp.WSCloseCode.GOING_AWAY))


class _Desk:
    """The turns of one asker, for as long as its websocket is open."""

    def __init__(
        self,
        request: web.Request,
        socket: web.WebSocketResponse,
        rollouts: ServedWorker,
        traffic: Traffic,
        plays: asyncio.TaskGroup,
        place: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._request = request
        self._socket = socket
        self._rollouts = rollouts
        self._traffic = traffic
        self._plays = plays
        self._place = place
        self._asked: dict[int, asyncio.Task[None]] = {}

    async def listen(self) -> None:
        """Until the asker closes, goes, or says what cannot be understood."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            self._traffic.down[_KIND] += len(message.data)
            try:
                asked = unpack_asked(message.data)
                self._take(asked)
            except PeerError as error:
                reason = str(error).encode()[:REASON_BYTES_MAX].decode(errors="ignore").encode()
                await self.hang_up(aiohttp.WSCloseCode.POLICY_VIOLATION, reason)

    async def hang_up(self, code: int, reason: bytes = b"") -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.close(code=code, message=reason)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()

    def withdraw_all(self) -> None:
        for task in self._asked.values():
            task.cancel()

    def _take(self, asked: Ask | Withdraw) -> None:
        if isinstance(asked, Withdraw):
            if task := self._asked.get(asked.id):
                task.cancel()
            return
        if asked.id in self._asked:
            raise PeerError(f"two turns with the id {asked.id}")
        if len(self._asked) >= TURNS_MAX:
            raise PeerError(f"{len(self._asked)} turns at once; at most {TURNS_MAX} may be asked")
        task = self._plays.create_task(self._play(asked), name=str(asked.turn))
        self._asked[asked.id] = task
        task.add_done_callback(lambda _task: self._asked.pop(asked.id))

    async def _play(self, asked: Ask) -> None:
        answered: Answered
        try:
            with self._place() as dispatched:
                play = self._rollouts.play(asked.turn, asked.history, dispatched=dispatched)
                played = await play
            answered = _answer(asked.id, played)
        except (RolloutsBusy, TurnRefused) as error:
            is_busy = isinstance(error, RolloutsBusy)
            answered = Refusal(asked.id, sentence(str(error)), is_busy)
        data = pack(answered)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._socket.send_bytes(data)
        except (ConnectionError, TimeoutError):  # the asker has gone, as `listen` finds out
            return
        self._traffic.up[_KIND] += len(data)


def _answer(number: int, played: Played) -> Answer:
    return Answer(number, played.held, played.num_reused, played.episode)
