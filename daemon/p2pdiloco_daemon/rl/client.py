"""Asks the rollout workers of other nodes; `rl.routes` answers.

All turns asked of a peer share one connection, opened with the first and closed when none is asked
for a while. What fails because a peer is dead, slow or busy raises an `ExchangeError`, what it does
against the protocol PeerError; a turn that the peer will not play raises what it would raise here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from yarl import URL

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import sentence
from p2pdiloco.protocol.turns import Load, TurnId
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_bootstrap.streams import peer_url
from p2pdiloco_daemon.exchange import (
    CONNECT_TIMEOUT_S,
    Busy,
    Exchange,
    ExchangeError,
    Refused,
    Unreachable,
    asking,
)
from p2pdiloco_daemon.rl.turn_wire import (
    FRAME_BYTES_MAX,
    LOAD_BYTES_MAX,
    LOAD_PATH,
    TURNS_PATH,
    Answered,
    Ask,
    Asked,
    Refusal,
    Withdraw,
    held_path,
    pack,
    unpack_answer,
    unpack_answered,
    unpack_load,
)
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.trajectories import HISTORY_BYTES_MAX, RolloutsBusy, TurnRefused

HEARTBEAT_S = 20.0
"""Between pings; a peer that leaves one unanswered for half of it is silent."""
IDLE_S = 60.0
"""Without a turn, after which a connection is closed."""
WRITE_TIMEOUT_S = 30.0
"""For a question to leave."""
CLOSE_TIMEOUT_S = 2.0
_KIND = "rollouts"
"""Of the bytes in `Traffic`."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A peer's load under the policy of `version`, and what asking for it took."""

    version: int
    load: Load
    rtt_s: float


class Workers:
    """Made by `asking_workers`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        traffic: Traffic,
        url: Callable[[str, str], URL],
        lines: asyncio.TaskGroup,
    ) -> None:
        self._exchange = Exchange(session, traffic, url)
        self._session = session
        self._traffic = traffic
        self._url = url
        self._tasks = lines
        self._lines: dict[str, _Line] = {}
        """The newest to each peer, until it ends."""
        self._open: set[asyncio.Task[None]] = set()

    async def load(self, peer: str) -> Heard:
        now = asyncio.get_running_loop().time
        started = now()
        data = await self._exchange.get(peer, LOAD_PATH, LOAD_BYTES_MAX)
        report = unpack_load(bytes(data))
        return Heard(report.version, report.load, now() - started)

    async def held(self, peer: str, step: int, trajectory: int) -> Played:
        """What the peer says to have played last of a trajectory; the episode is unchecked."""
        path = held_path(step, trajectory)
        return unpack_answer(bytes(await self._exchange.get(peer, path, FRAME_BYTES_MAX))).played

    async def play(self, peer: str, turn: TurnId, history: bytes) -> Played:
        """Has the peer play a turn; what comes back is unchecked. Cancelling withdraws it."""
        if len(history) > HISTORY_BYTES_MAX:
            raise TurnRefused(f"a history of {len(history)} bytes; {HISTORY_BYTES_MAX} may be sent")
        line = self._lines.get(peer)
        if line is None or not line.is_open:
            line = self._open_line(peer)
        answered = await line.ask(turn, history)
        if isinstance(answered, Refusal):
            raise (RolloutsBusy if answered.is_busy else TurnRefused)(answered.reason)
        asked, held = (turn.step, turn.trajectory), answered.held.turn
        if (held.step, held.trajectory) != asked or not turn.turn <= held.turn <= turn.turn + 1:
            raise PeerError(f"{peer} was asked for {turn}, answered {held}")
        return answered.played

    def _open_line(self, peer: str) -> "_Line":
        line = _Line(peer, self._session, self._url(peer, TURNS_PATH), self._traffic)
        self._lines[peer] = line
        task = self._tasks.create_task(line.run(), name=f"turns at {peer[-8:]}")
        self._open.add(task)

        def ended(_task: asyncio.Task[None]) -> None:
            self._open.discard(task)
            if self._lines.get(peer) is line:
                del self._lines[peer]

        task.add_done_callback(ended)
        return line

    def hang_up(self) -> None:
        """Withdraws all turns."""
        for task in self._open:
            task.cancel()


@asynccontextmanager
async def asking_workers(
    session: aiohttp.ClientSession,
    traffic: Traffic,
    url: Callable[[str, str], URL] = peer_url,
) -> AsyncIterator[Workers]:
    """Over the session of a host; `url` says where a peer's paths are. Leaving withdraws all."""
    async with asyncio.TaskGroup() as lines:
        workers = Workers(session, traffic, url, lines)
        try:
            yield workers
        finally:
            workers.hang_up()


class _Line:
    """One websocket to a peer, and who waits for its answers."""

    def __init__(
        self, peer: str, session: aiohttp.ClientSession, url: URL, traffic: Traffic
    ) -> None:
        self.is_open = True
        self._peer = peer
        self._session = session
        self._url = url
        self._traffic = traffic
        self._last_id = 0
        self._outgoing: asyncio.Queue[Asked] = asyncio.Queue()
        """No longer than twice the turns that are asked for."""
        self._waiting: dict[int, asyncio.Future[Answered]] = {}

    async def ask(self, turn: TurnId, history: bytes) -> Answered:
        """ExchangeError or PeerError if the line ends before it is answered."""
        self._last_id += 1
        number = self._last_id
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._outgoing.put_nowait(Ask(number, turn, history))
        try:
            return await future
        finally:
            if self._waiting.pop(number, None):
                self._outgoing.put_nowait(Withdraw(number))

    async def run(self) -> None:
        """Until it is idle or broken. Whoever waits then is told."""
        why: ExchangeError | PeerError = Unreachable(f"{self._peer}: no turns are asked any more")
        try:
            socket = await self._connect()
            try:
                why = await self._converse(socket)
            finally:
                self._end(why)
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await socket.close()
        except ExchangeError as error:
            why = error
        finally:
            self._end(why)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        async with asking(self._peer), asyncio.timeout(CONNECT_TIMEOUT_S):
            try:
                return await self._session.ws_connect(
                    self._url, heartbeat=HEARTBEAT_S, max_msg_size=FRAME_BYTES_MAX
                )
            except aiohttp.WSServerHandshakeError as error:
                kind = Busy if error.status == 503 else Refused
                raise kind(self._peer, error.status, "no turns are played") from error

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> ExchangeError | PeerError:
        """Why it is over."""
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send(socket), name="turns asked")
            why = await self._receive(socket)
            sending.cancel()
        return why

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            data = pack(await self._outgoing.get())
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await socket.send_bytes(data)
            except (ConnectionError, TimeoutError):
                await socket.close()
                return
            self._traffic.up[_KIND] += len(data)

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> ExchangeError | PeerError:
        while True:
            try:
                message = await socket.receive(timeout=IDLE_S)
            except TimeoutError:
                if self._waiting:
                    continue
                return Unreachable(f"{self._peer} was asked for no turn for {IDLE_S:.0f} s")
            if message.type is not aiohttp.WSMsgType.BINARY:
                words = sentence(str(message.extra or message.data or "without a word"))
                return Unreachable(f"{self._peer} hung up: {words}")
            self._traffic.down[_KIND] += len(message.data)
            try:
                answered = unpack_answered(message.data)
            except PeerError as error:
                return error
            future = self._waiting.pop(answered.id, None)
            if future is not None and not future.done():
                future.set_result(answered)

    def _end(self, why: ExchangeError | PeerError) -> None:
        self.is_open = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(why)
        self._waiting.clear()
