"""Our questions to p2pd, over its control socket: one protobuf request, one answer, per connection.

hivemind has a client of the same; ours closes the connection when an answer is a refusal or does
not come, where hivemind leaves that to the garbage collector.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from p2pdiloco_bootstrap import addresses as multiaddrs
from p2pdiloco_bootstrap.identity import base58_decode, base58_encode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CONTROL_TIMEOUT_S = 5.0
"""For p2pd to answer a question about itself; it takes a millisecond."""


class Control:
    """Asks the p2pd whose control socket lies at `path`; ConnectionError where it gives nothing."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def addresses(self) -> list[str]:
        """Our multiaddrs as they are now, without our peer id."""
        async with self._asking_soon("IDENTIFY") as answer:
            return _texts(answer.identify.addrs)

    async def connections(self) -> dict[str, tuple[str, ...]]:
        """Peers with an open connection, and its addresses."""
        async with self._asking_soon("LIST_PEERS") as answer:
            return {base58_encode(peer.id): tuple(_texts(peer.addrs)) for peer in answer.peers}

    async def connect(self, peer: str, addresses: Sequence[multiaddrs.RawMultiaddr]) -> None:
        """Dials all addresses, or those that p2pd knows; the caller sets the limit of time."""
        asked = p2pd_pb2.ConnectRequest(
            peer=base58_decode(peer), addrs=[address.encoded for address in addresses]
        )
        async with self._asking(_request("CONNECT", connect=asked)):
            pass

    async def disconnect(self, peer: str) -> None:
        """Closes all connections to `peer`."""
        asked = p2pd_pb2.DisconnectRequest(peer=base58_decode(peer))
        async with (
            asyncio.timeout(CONTROL_TIMEOUT_S),
            self._asking(_request("DISCONNECT", disconnect=asked)),
        ):
            pass

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        """A stream to the peer's handler of `protocol`; the caller sets the limit of time."""
        asked = p2pd_pb2.StreamOpenRequest(peer=base58_decode(peer), proto=[protocol])
        stream = await self._open()
        try:
            await _ask(stream, _request("STREAM_OPEN", streamOpen=asked))
        except BaseException:
            stream[1].transport.abort()
            raise
        return stream

    @asynccontextmanager
    async def _asking_soon(self, kind: str) -> AsyncIterator[Any]:
        async with asyncio.timeout(CONTROL_TIMEOUT_S), self._asking(_request(kind)) as answer:
            yield answer

    @asynccontextmanager
    async def _asking(self, request: Any) -> AsyncIterator[Any]:
        stream = await self._open()
        try:
            yield await _ask(stream, request)
        finally:
            stream[1].transport.abort()

    async def _open(self) -> Stream:
        try:
            return await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise ConnectionError(f"the network process p2pd is gone ({error.strerror})") from error


async def _ask(stream: Stream, request: Any) -> Any:
    reader, writer = stream
    answer = p2pd_pb2.Response()
    try:
        await write_pbmsg(writer, request)
        await read_pbmsg_safe(reader, answer)
    except EOFError as error:
        raise ConnectionError("the network process p2pd is gone") from error
    if answer.type == p2pd_pb2.Response.ERROR:
        raise ConnectionError(answer.error.msg)
    return answer


def _request(kind: str, **fields: Any) -> Any:
    return p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind), **fields)


def _texts(encoded: Sequence[bytes]) -> list[str]:
    return [text for address in encoded if (text := multiaddrs.decode(address))]
