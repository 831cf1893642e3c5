"""What a DHT node believes: member records, and clocks."""

import asyncio
import dataclasses
import time
import warnings
from types import SimpleNamespace
from typing import cast

import msgpack
import pytest

from p2pdiloco_bootstrap.discovery import (
    RECORD_LIFETIME_S_MAX,
    ClockOffset,
    Discovery,
    MemberRecords,
)
from p2pdiloco_bootstrap.host import Host
from p2pdiloco_bootstrap.identity import Identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.crypto import DHTRecord
    from hivemind.proto import dht_pb2

IDENTITY = Identity.generate()
OTHER = Identity.generate()
CONTENT = msgpack.packb(b"content")


def signed(
    by: Identity,
    peer: str = IDENTITY.peer_id,
    lifetime_s: float = 600.0,
    content: bytes = CONTENT,
) -> DHTRecord:
    record = DHTRecord(b"k" * 20, msgpack.packb(peer), content, time.time() + lifetime_s)
    return dataclasses.replace(record, value=MemberRecords(by).sign_value(record))


def believed(record: DHTRecord) -> bool:
    return MemberRecords(OTHER).validate(record)


def test_a_members_own_record_is_believed_and_comes_back_bare() -> None:
    record = signed(IDENTITY)
    assert believed(record)
    assert MemberRecords(OTHER).strip_value(record) == CONTENT


def test_a_record_in_the_name_of_another_is_refused() -> None:
    assert not believed(signed(OTHER, peer=IDENTITY.peer_id))


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"K" * 20},
        {"subkey": msgpack.packb(OTHER.peer_id)},
        {"expiration_time": time.time() + 900},
        {"value": b""},
        {"value": bytes(200)},
        {"subkey": msgpack.packb(7)},
        {"subkey": b""},
        {"subkey": msgpack.packb("x" * 300)},
    ],
)
def test_any_change_is_noticed(change: dict[str, object]) -> None:
    assert not believed(dataclasses.replace(signed(IDENTITY), **change))


def test_a_record_that_would_live_for_days_is_refused() -> None:
    assert not believed(signed(IDENTITY, lifetime_s=RECORD_LIFETIME_S_MAX + 60))


def test_a_giant_record_is_refused() -> None:
    record = dataclasses.replace(signed(IDENTITY), value=bytes(5000))
    value = MemberRecords(IDENTITY).sign_value(record)
    assert not believed(dataclasses.replace(record, value=value))


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\xc4\xff", CONTENT * 2, b"\x91" * 2000, msgpack.packb(7)]
)
def test_a_record_that_would_end_a_look_up_is_refused(content: bytes) -> None:
    assert not believed(signed(IDENTITY, content=content))


class FakeProtocol:
    """Of a DHT node whose neighbours answer a ping with these bytes."""

    node_info = dht_pb2.NodeInfo(node_id=b"n")
    wait_timeout = 1.0

    def __init__(self, *answers: bytes) -> None:
        self.routing_table = SimpleNamespace(uid_to_peer_id=dict(enumerate(answers)))

    def get_stub(self, answer: bytes) -> SimpleNamespace:
        async def rpc_ping(request: dht_pb2.PingRequest) -> dht_pb2.PingResponse:
            return dht_pb2.PingResponse.FromString(answer)

        return SimpleNamespace(rpc_ping=rpc_ping)


def ping_answer(dht_time: float) -> bytes:
    return bytes(dht_pb2.PingResponse(dht_time=dht_time).SerializeToString())


def test_neighbours_that_answer_with_garbage_are_asked_for_no_time() -> None:
    ahead, nowhere = ping_answer(time.time() + 3600), ping_answer(float("nan"))
    protocol = FakeProtocol(b"\xff" * 9, nowhere, ahead)
    host = SimpleNamespace(dht=SimpleNamespace(protocol=protocol))
    offset = asyncio.run(Discovery(cast(Host, host), "run").clock_offset())
    assert offset is not None and offset.num_peers == 1
    assert offset.offset_s == pytest.approx(3600, abs=60)


def test_a_wrong_clock_is_named_with_its_direction() -> None:
    assert ClockOffset(1.0, 3).problem() is None
    behind, ahead = ClockOffset(47.3, 3).problem(), ClockOffset(-3600.0, 1).problem()
    assert behind is not None and "clock is 47 s behind that of 3 peers" in behind
    assert ahead is not None and "clock is 3600 s ahead of that of 1 peers" in ahead
    assert "NTP" in behind
