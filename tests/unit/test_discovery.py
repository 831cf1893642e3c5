"""What a DHT node believes: member records, and clocks."""

import dataclasses
import time
import warnings

import msgpack
import pytest

from p2pdiloco_bootstrap.discovery import RECORD_LIFETIME_S_MAX, ClockOffset, MemberRecords
from p2pdiloco_bootstrap.identity import Identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.dht.crypto import DHTRecord

IDENTITY = Identity.generate()
OTHER = Identity.generate()
CONTENT = msgpack.packb(b"content")


def signed(by: Identity, peer: str = IDENTITY.peer_id, lifetime_s: float = 600.0) -> DHTRecord:
    record = DHTRecord(b"k" * 20, msgpack.packb(peer), CONTENT, time.time() + lifetime_s)
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


def test_a_wrong_clock_is_named_with_its_direction() -> None:
    assert ClockOffset(1.0, 3).problem() is None
    behind, ahead = ClockOffset(47.3, 3).problem(), ClockOffset(-3600.0, 1).problem()
    assert behind is not None and "clock is 47 s behind that of 3 peers" in behind
    assert ahead is not None and "clock is 3600 s ahead of that of 1 peers" in ahead
    assert "NTP" in behind
