"""hivemind's DHT on our p2pd, and the client it needs; its errors are made ours here.

hivemind has no types: what it gives is `Any`, and stays here, in `host.py` and in `discovery.py`.
"""

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, cast
from uuid import UUID

from p2pdiloco_bootstrap.control import CONTROL_TIMEOUT_S
from p2pdiloco_bootstrap.discovery import MemberRecords
from p2pdiloco_bootstrap.identity import Identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DispatchFailure
    from hivemind.proto import dht_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

log = logging.getLogger(__name__)

DHT_WAIT_S = 0.5
"""For a DHT peer to answer. With hivemind's 3 s a store beside one hung peer took 6 s."""

_take_stream, _answer_ping = ControlClient._handler, DHTProtocol.rpc_ping


@wraps(_take_stream)
async def take_stream(self: Any, reader: asyncio.StreamReader, writer: Any) -> None:
    """hivemind's, in a task that nobody awaits: a stream that comes while its handler goes, or
    whose p2pd is killed just then, would be a traceback in the log.
    """
    try:
        await _take_stream(self, reader, writer)
    except (DispatchFailure, EOFError, OSError) as error:
        log.debug("a stream came to nothing: %r", error)
        writer.close()


@wraps(_answer_ping)
async def answer_ping(self: Any, request: Any, context: Any) -> Any:
    """hivemind's, which asks this of itself, too, for each store and find, in tasks that it
    forgets: by an id that is none a stranger could fill the log with their tracebacks. Whoever
    sends one is answered as a mere client is.
    """
    if len(request.peer.node_id) != DHTID.HASH_NBYTES:
        request = dht_pb2.PingRequest(validate=request.validate)
    return await _answer_ping(self, request, context)


ControlClient._handler = take_stream
DHTProtocol.rpc_ping = answer_ping

DHTProtocol.node_info = dht_pb2.NodeInfo()
"""What a node that is still starting says of itself: nothing, as a mere client does. hivemind takes
requests before it has filled this in, and peers that knew the node in its last life ask at once."""

use_hivemind_log_handler("nowhere")


class PendingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """By call, what hivemind's reading of p2pd's answers looks into. An answer that comes in the
    very moment in which its call is given up is none of them: to set the result of a cancelled
    future would end the reading, and with it the DHT.
    """

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[cast(UUID, call)].done()


@asynccontextmanager
async def p2p_client(sockets: str) -> AsyncIterator[Any]:
    """hivemind's client of our p2pd, with its own socket beside p2pd's."""

    class LocalP2P(P2P):  # type: ignore[misc]  # hivemind has no types
        _UNIX_SOCKET_PREFIX = f"/unix{sockets}"

    async with asyncio.timeout(CONTROL_TIMEOUT_S):
        p2p = await translated(LocalP2P.replicate(Multiaddr(f"/unix{sockets}p2pd.sock")))
    p2p._client.control._pending_calls = PendingCalls()
    for task in (p2p._client.control._read_task, p2p._client.control._write_task):
        task.add_done_callback(note_lost_connection)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


@asynccontextmanager
async def dht_node(p2p: Any, identity: Identity) -> AsyncIterator[Any]:
    """A DHT node without neighbours yet; `call_ping` to a peer makes the two know each other."""
    async with asyncio.timeout(CONTROL_TIMEOUT_S):
        creating = DHTNode.create(
            p2p,
            node_id=DHTID.generate(source=identity.peer_id),  # the same after a restart
            wait_timeout=DHT_WAIT_S,
            record_validator=MemberRecords(identity),
            cache_size=1024,
        )
        node = await translated(creating)
    try:
        yield node
    finally:
        # not node.shutdown(): it would only tell p2pd, which ends now or has ended, to forget us
        node.is_alive = False
        if node.cache_refresh_task is not None:
            node.cache_refresh_task.cancel()


def note_lost_connection(task: asyncio.Task[None]) -> None:
    """hivemind's end of its connection to p2pd expects no reset, which is how a killed p2pd may end
    it, and nobody awaits it; that p2pd is gone is noticed by `watch`."""
    if not task.cancelled() and isinstance(error := task.exception(), OSError):
        log.debug("the connection to p2pd broke: %s", error)


async def translated(call: Any) -> Any:
    """The result of hivemind's `call`; what it raises about p2pd and peers as ConnectionError."""
    try:
        return await call
    except (P2PDaemonError, P2PHandlerError, EOFError) as error:
        raise ConnectionError(str(error) or "the network process p2pd is gone") from error
