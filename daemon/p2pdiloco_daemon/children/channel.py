"""How the daemon and a process of its own speak: frames over a socket pair.

A frame is four bytes big-endian length and a msgpack list `[name of the message, its fields in
order]`. The messages themselves are dataclasses of `learner.messages` and `rollouts.messages`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Generic, TypeVar, get_type_hints

import msgpack

from p2pdiloco.errors import P2PDilocoError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MESSAGE_BYTES_MAX = 1 << 20
"""The largest have an episode in them: 12 bytes for each of at most 65536 tokens, and the rest. A
run spec, in `Start`, has at most 256 KiB."""

_LENGTH_BYTES = 4

M = TypeVar("M")


class ChannelError(P2PDilocoError):
    """Bytes on the control socket that are no message: end the process at the other end."""


def pack(message: "DataclassInstance") -> bytes:
    """One frame."""
    values = [getattr(message, field.name) for field in fields(message)]
    body = msgpack.packb([type(message).__name__, *values])
    assert len(body) <= MESSAGE_BYTES_MAX, f"{type(message).__name__} of {len(body)} bytes"
    return len(body).to_bytes(_LENGTH_BYTES, "big") + bytes(body)


class MessageReader(Generic[M]):
    """Cuts a byte stream into messages of the given kinds; ChannelError on anything else."""

    def __init__(self, kinds: Sequence[type[M]]) -> None:
        self._kinds: dict[str, Callable[..., M]] = {kind.__name__: kind for kind in kinds}
        self._hints = {kind.__name__: get_type_hints(kind) for kind in kinds}
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that `data` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + self._body_bytes()
            if len(self._buffer) < end:
                break
            messages.append(self._parse(bytes(self._buffer[_LENGTH_BYTES:end])))
            del self._buffer[:end]
        return messages

    def _body_bytes(self) -> int:
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if length > MESSAGE_BYTES_MAX:
            raise ChannelError(
                f"a control message has at most {MESSAGE_BYTES_MAX} bytes, got {length}"
            )
        return length

    def _parse(self, body: bytes) -> M:
        try:
            match msgpack.unpackb(body, use_list=False):
                case (str(name), *values) if name in self._kinds:
                    return self._build(name, values)
        except (ValueError, msgpack.UnpackException) as error:
            raise ChannelError(f"a control message of {len(body)} bytes is not msgpack") from error
        raise ChannelError(f"expected one of {', '.join(self._kinds)}, got {body[:40]!r}")

    def _build(self, name: str, values: list[object]) -> M:
        hints = self._hints[name]
        if len(values) != len(hints) or not all(
            type(value) is hint for value, hint in zip(values, hints.values(), strict=True)
        ):
            raise ChannelError(f"a {name} has the fields {', '.join(hints)}, got {values!r:.80}")
        return self._kinds[name](*values)
