"""The little protobuf that libp2p's messages need, against hivemind's compiled ones."""

import asyncio
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco_bootstrap import protobuf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing hivemind runs deprecated parts of torch
    from hivemind.proto import p2pd_pb2

FIELDS = st.lists(
    st.tuples(st.integers(1, 500), st.integers(0, 2**63 - 1) | st.binary(max_size=300))
)


@given(FIELDS)
def test_fields_survive_their_binary_form(fields: list[tuple[int, protobuf.Value]]) -> None:
    found = protobuf.unpack(protobuf.pack(fields))
    assert found == {
        number: [value for other, value in fields if other == number] for number, _ in fields
    }


def test_a_message_is_that_of_the_real_protobuf() -> None:
    real = p2pd_pb2.ConnectRequest(peer=b"peer", addrs=[b"one", b"two"], timeout=300)
    packed = protobuf.pack([(1, b"peer"), (2, b"one"), (2, b"two"), (3, 300)])
    assert packed == real.SerializeToString()


@given(st.binary(max_size=200))
def test_nonsense_ends_the_reading(message: bytes) -> None:
    protobuf.unpack(message)


def test_what_is_missing_or_of_another_type_is_empty() -> None:
    fields = protobuf.unpack(protobuf.pack([(1, b"text"), (2, 7)]))
    assert protobuf.number_in(fields, 1) == protobuf.number_in(fields, 9) == 0
    assert protobuf.bytes_in(fields, 2) == protobuf.bytes_in(fields, 9) == b""


def read(stream: bytes) -> bytes:
    async def main() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        return await protobuf.read_delimited(reader)

    return asyncio.run(main())


def test_a_message_is_read_off_a_stream() -> None:
    assert read(protobuf.delimited(bytes(300)) + b"more") == bytes(300)


def test_a_message_that_says_it_is_huge_is_cut_off() -> None:
    assert len(read(b"\xff\xff\xff\x7f" + bytes(10_000))) == protobuf.MESSAGE_BYTES_MAX


def test_a_stream_that_ends_too_soon_is_an_error() -> None:
    with pytest.raises(EOFError):
        read(b"\x05abc")
