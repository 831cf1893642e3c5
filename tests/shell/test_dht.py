"""What hivemind does by itself becomes neither a crash nor noise in the log."""

import asyncio
import errno
import gc
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from p2pdiloco_bootstrap import dht as dht_module
from p2pdiloco_bootstrap.dht import PendingCalls, note_lost_connection
from p2pdiloco_bootstrap.identity import Identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2PDaemonError, PeerID
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
    from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr


Handler = Callable[[Any, Any], Awaitable[Any]]

STRANGER = DHTID.generate(source="stranger").to_bytes()
REQUESTS = {
    "rpc_ping": lambda peer: dht_pb2.PingRequest(peer=peer),
    "rpc_store": lambda peer: dht_pb2.StoreRequest(peer=peer),
    "rpc_find": lambda peer: dht_pb2.FindRequest(peer=peer),
}


class Peers:
    """Those of a p2pd: one sends `request` at once when its handler is there."""

    peer_id = PeerID.from_base58(Identity.generate().peer_id)

    def __init__(self, request: str, sender: Any) -> None:
        self._request, self._sender = request, sender
        self.answers: list[Any] = []

    async def add_protobuf_handler(self, name: str, handler: Handler, *_: Any, **__: Any) -> None:
        if name.endswith(self._request):
            context = type("Context", (), {"remote_id": self.peer_id})
            self.answers.append(await handler(REQUESTS[self._request](self._sender), context))
            for _turn in range(3):  # what the handler has started, and that again
                await asyncio.sleep(0)


@pytest.mark.parametrize("asked", sorted(REQUESTS))
@pytest.mark.parametrize(
    "node_id", [STRANGER, bytes(21), b"\xff" * 99], ids=["an id", "too long", "far too long"]
)
def test_a_peer_that_asks_while_the_dht_starts_or_in_no_name_is_answered(
    asked: str, node_id: bytes
) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        peers = Peers(asked, dht_pb2.NodeInfo(node_id=node_id))
        async with dht_module.dht_node(peers, Identity.generate()) as node:
            assert node.protocol.node_info.node_id  # from now on it says who it is
        assert len(peers.answers) == 1
        del node
        gc.collect()

    complaints: list[dict[str, object]] = []
    asyncio.run(main())
    assert not complaints


@pytest.mark.loopback
@pytest.mark.parametrize("says_what_it_wants", [True, False])
def test_a_stream_that_nobody_takes_or_that_breaks_off_is_closed(
    tmp_path: Path, says_what_it_wants: bool
) -> None:
    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        address = Multiaddr(f"/unix{tmp_path}/client.sock")
        client = ControlClient(None, address, _initialized_with_create=True)
        client._read_task = client._write_task = None
        async with client.listen():
            reader, writer = await asyncio.open_unix_connection(tmp_path / "client.sock")
            if says_what_it_wants:
                peer = Peers.peer_id.to_bytes()
                wanted = p2pd_pb2.StreamInfo(peer=peer, addr=b"", proto="/gone")
                await write_pbmsg(writer, wanted)
            else:
                writer.write(b"\x7f")
                writer.write_eof()
            rest = await reader.read()
            writer.close()
            await writer.wait_closed()
        gc.collect()
        return rest

    complaints: list[dict[str, object]] = []
    assert asyncio.run(main()) == b""
    assert not complaints


def test_an_answer_to_a_call_that_was_given_up_just_now_ends_nothing() -> None:
    async def main() -> None:
        address = Multiaddr("/unix/none")
        client = ControlClient(None, address, _initialized_with_create=True)
        client._read_task = client._write_task = None
        client._pending_calls = PendingCalls()
        calls = [uuid4(), uuid4()]
        answers = [client._pending_calls.setdefault(call, asyncio.Future()) for call in calls]
        answers[0].cancel()
        reader = asyncio.StreamReader()
        for call in calls:
            answer = p2pd_pb2.CallUnaryResponse(response=b"yes")
            told = p2pd_pb2.PersistentConnectionResponse(
                callId=call.bytes, callUnaryResponse=answer
            )
            reader.feed_data(bytes([told.ByteSize()]) + told.SerializeToString())
        reader.feed_eof()
        await client._read_from_persistent_conn(reader)
        assert await answers[1] == b"yes"

    asyncio.run(main())


def test_a_p2pd_that_is_killed_while_the_dht_starts_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def create(*_: object, **__: object) -> None:
        raise P2PDaemonError("the connection is closed")

    async def main() -> None:
        async with dht_module.dht_node(None, Identity.generate()):
            raise AssertionError("there is no DHT")

    monkeypatch.setattr(DHTNode, "create", create)
    with pytest.raises(ConnectionError, match="the connection is closed"):
        asyncio.run(main())


def test_that_a_killed_p2pd_resets_its_connection_is_no_forgotten_error() -> None:
    complaints: list[dict[str, object]] = []

    async def break_off() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset by peer")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        task = asyncio.create_task(break_off())
        task.add_done_callback(note_lost_connection)
        await asyncio.wait((task,))
        del task
        gc.collect()

    asyncio.run(main())
    assert not complaints
