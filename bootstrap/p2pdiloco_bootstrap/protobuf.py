"""As much of protobuf as libp2p's small messages need: varints, bytes, messages within messages."""

import asyncio
from collections.abc import Mapping, Sequence

Value = int | bytes

MESSAGE_BYTES_MAX = 4096
"""Of an answer about relaying or reachability; they have some hundred bytes."""


def pack(fields: Sequence[tuple[int, Value]]) -> bytes:
    """(field number, value) in order; a message within the message is given as its bytes."""
    packed = b""
    for number, value in fields:
        if isinstance(value, int):
            packed += _packed_varint(number << 3) + _packed_varint(value)
        else:
            packed += _packed_varint(number << 3 | 2) + delimited(value)
    return packed


def delimited(message: bytes) -> bytes:
    """With its length before it, as it travels on a stream."""
    return _packed_varint(len(message)) + message


def unpack(message: bytes) -> dict[int, list[Value]]:
    """Values by field number; reading ends at what is neither number nor bytes."""
    fields: dict[int, list[Value]] = {}
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value, place = _varint(message, place)
        if key & 7 == 0:
            fields.setdefault(key >> 3, []).append(value)
        elif key & 7 == 2:
            fields.setdefault(key >> 3, []).append(message[place : place + value])
            place += value
        else:
            break
    return fields


def number_in(fields: Mapping[int, Sequence[Value]], number: int) -> int:
    """The field's last value; 0 where there is none, as protobuf has it."""
    value = fields.get(number, [0])[-1]
    return value if isinstance(value, int) else 0


def bytes_in(fields: Mapping[int, Sequence[Value]], number: int) -> bytes:
    """The field's last value; empty where there is none."""
    value = fields.get(number, [b""])[-1]
    return value if isinstance(value, bytes) else b""


async def read_delimited(reader: asyncio.StreamReader) -> bytes:
    """The next message of a stream, cut off at `MESSAGE_BYTES_MAX`."""
    size, shift = 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or size > MESSAGE_BYTES_MAX:
            break
    return await reader.readexactly(min(size, MESSAGE_BYTES_MAX))


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """-> (value, place after it)"""
    value, shift = 0, 0
    for byte in message[place:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        place += 1
        if byte < 0x80:
            break
    return value, place


def _packed_varint(value: int) -> bytes:
    packed = bytearray()
    while value >= 0x80:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*packed, value))
