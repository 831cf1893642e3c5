"""What hivemind does by itself becomes neither a crash nor noise in the log."""

import asyncio
import errno
import gc
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from p2pdiloco_bootstrap import dht as dht_module
from p2pdiloco_bootstrap.dht import note_lost_connection
from p2pdiloco_bootstrap.identity import Identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2PDaemonError, PeerID
    from hivemind.proto import dht_pb2


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
