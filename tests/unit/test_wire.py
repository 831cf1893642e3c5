import random
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_builders import A, make_heartbeat, make_record, opened, ready

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import wire
from p2pdiloco.protocol.naming import PeerId, RoundId, sentence
from p2pdiloco.protocol.wire import (
    FRAGMENTS_MAX,
    MESSAGE_BYTES_MAX,
    NAME_CHARS_MAX,
    SIGHTINGS_MAX,
    Committed,
    Head,
    Left,
    RoundDeclined,
    Sighting,
    pack,
    unpack,
)

ROUND = RoundId(0, 1, 0, 0)
ONE_OF_EACH: list[wire.Message] = [
    make_heartbeat(sightings=(Sighting(A, 3, 4),)),
    opened(None),
    ready(ROUND),
    RoundDeclined(ROUND, "still at v0"),
    Committed(make_record()),
    Left(),
]


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda m: str(m.kind))
def test_every_message_comes_back_as_it_was(message: wire.Message) -> None:
    assert unpack(pack(message)) == message
    assert unpack(memoryview(pack(message))) == message


def test_a_record_keeps_its_digest_and_signature_on_the_way() -> None:
    record = make_record()
    assert record.digest
    back = unpack(pack(Committed(record)))
    assert isinstance(back, Committed)
    assert (back.record.digest, back.record.signature) == (record.digest, record.signature)


def test_the_largest_heartbeat_fits_into_a_message() -> None:
    count = 2**63 - 1
    largest = make_heartbeat(
        count,
        run_id="f" * 64,
        incarnation=count,
        name="\N{GRINNING FACE}" * NAME_CHARS_MAX,
        local_steps=(count,) * FRAGMENTS_MAX,
        heads=(Head(2**53 - 1, "f" * 64, count),) * FRAGMENTS_MAX,
        sightings=(Sighting(PeerId("z" * 64), count, count),) * SIGHTINGS_MAX,
    )
    data = pack(largest)
    assert len(data) <= MESSAGE_BYTES_MAX
    assert unpack(data) == largest


def fields(message: wire.Message) -> dict[str, Any]:
    unpacked: dict[str, Any] = msgpack.unpackb(pack(message))
    return unpacked


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "heartbeet"},
        {"kind": None},
        {"sequence": -1},
        {"sequence": 2**63},
        {"step_s": float("nan")},
        {"step_s": float("inf")},
        {"step_s": -1.0},
        {"uplink_mb_s": 1e300},
        {"ready": "perhaps"},
        {"name": "n" * 65},
        {"name": "\x1b[2J"},
        {"heads": [{"version": 1, "digest": "xyz", "tokens_total": 0}]},
        {"heads": 7},
        {"local_steps": [1] * (FRAGMENTS_MAX + 1)},
        {"sightings": [{"peer": "p", "incarnation": 0, "sequence": 0}] * (SIGHTINGS_MAX + 1)},
        {"sightings": [{"peer": "", "incarnation": 0, "sequence": 0}]},
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="a malformed message"):
        unpack(msgpack.packb(fields(make_heartbeat()) | change))


def test_a_missing_field_is_named() -> None:
    bare = fields(Left()) | {"kind": "round_opened"}
    with pytest.raises(PeerError, match=r"round_opened\.round: Field required"):
        unpack(msgpack.packb(bare))


def test_a_message_that_is_too_long_is_not_read() -> None:
    with pytest.raises(PeerError, match="at most 65536 are read"):
        unpack(bytes(MESSAGE_BYTES_MAX + 1))


def test_a_refusal_quotes_little_of_what_was_sent() -> None:
    for kind in ("k" * 60_000, "\x1b[31m\n" * 10):
        with pytest.raises(PeerError) as refused:
            unpack(msgpack.packb({"kind": kind}))
        assert len(str(refused.value)) <= 200
        assert str(refused.value).isprintable()


def test_a_reason_with_control_characters_is_refused() -> None:
    with pytest.raises(PeerError):
        unpack(pack(RoundDeclined(ROUND, "first line\nsecond line")))


def test_any_text_can_be_made_a_sentence() -> None:
    text = sentence("Traceback:\n\x1b[31m\ud800" + "x" * 500)
    assert unpack(pack(RoundDeclined(ROUND, text))) == RoundDeclined(ROUND, text)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        unpack(data)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ONE_OF_EACH), st.data())
def test_a_message_with_one_field_replaced_is_read_or_refused(
    message: wire.Message, data: st.DataObject
) -> None:
    mutated = fields(message)
    place = mutated
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        inner = place[key]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(anything)
    try_to_read(msgpack.packb(mutated))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ONE_OF_EACH), st.integers(0, 2**32))
def test_a_message_with_flipped_bytes_is_read_or_refused(message: wire.Message, seed: int) -> None:
    rng, data = random.Random(seed), bytearray(pack(message))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try_to_read(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))


def try_to_read(data: bytes) -> None:
    """Only PeerError may come out, and what is read can be sent on."""
    try:
        message = unpack(data)
    except PeerError:
        return
    assert unpack(pack(message)) == message


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    newer = fields(Left()) | {"farewell": "so long"}
    assert unpack(msgpack.packb(newer)) == Left()


def test_records_of_any_reason_stay_within_the_message() -> None:
    parts = {PeerId(f"{i:052d}"): 2**50 for i in range(64)}
    record = replace(make_record(tokens=parts), reason="r" * 200)
    assert len(pack(Committed(record))) <= MESSAGE_BYTES_MAX
