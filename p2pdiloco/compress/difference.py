"""Vectors that change little, coded as their difference to what the receiver is known to hold.

Mixing parameters (optim/mixing.py) needs the partner's whole vector, round after round, though it
moves by a small step between two exchanges. So the sender codes its difference to the value that
the receiver has decoded before, which both ends compute to the same last bit:

    payload = codec(x_t - held),   held <- held + decode(payload)

as in CHOCO-SGD (arXiv 1902.00340). What the codec loses is part of the next difference, so errors
do not add up, and they shrink as the vector comes to rest. The receiver names what it holds in its
request; that alone moves the sender's knowledge on, so lost payloads and restarts do no harm.

It costs one more vector per partner and direction on either side, so it suits partners that come
back. Others start from a vector that everybody has, such as the weights of the last merge.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pdiloco.compress.codec import decode, encode
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.errors import PeerError

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector."""


class Sent:
    """What one partner may hold of a vector of ours: what everybody has, what it has named, and
    what we coded for it last.
    """

    def __init__(self, common: Vector) -> None:
        self._copies: dict[int | None, Vector] = {None: common}

    def knows(self, number: int | None) -> bool:
        """Whether the partner may hold our vector of that round."""
        return number in self._copies

    def encode(
        self, number: int, values: Vector, held: int | None, wire: WireFormat
    ) -> tuple[bytes, Vector]:
        """The payload of round `number` for a partner that holds our vector of round `held` (None:
        what everybody has), and what it holds once that has arrived.

        PeerError if we know nothing of that round: the partner should start from None.
        """
        if held not in self._copies:
            raise PeerError(f"it names round {held} of our vector, which it was never sent")
        base = self._copies[held]
        payload = encode(values - base, wire)
        arrived = decode_difference(payload, base, wire)
        self._copies = {None: self._copies[None], held: base, number: arrived}
        return payload, arrived


def decode_difference(
    payload: bytes | bytearray | memoryview, base: Vector, wire: WireFormat
) -> Vector:
    """The partner's vector, f32 [n], given what we hold of it; PayloadError as `codec.decode`."""
    return base + decode(payload, base.size, wire)
