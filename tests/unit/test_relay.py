"""Reading the limit that a relay grants out of its answer."""

import pytest

from p2pdiloco_bootstrap.relay import granted_bytes_in

STATUS_AND_RESERVATION = bytes.fromhex("0802" + "1a04" + "08ffff01")
"""A HopMessage with type = STATUS and some reservation."""


@pytest.mark.parametrize(
    ("limit", "granted"),
    [
        ("22060878108080082864", 128 << 10),  # go-libp2p's defaults, as p2pd sent them
        ("220908880e1080808080102864", 4 << 30),  # those of p2pd's flags
        ("", 0),
        ("2200", 0),
        ("2202", 0),
        ("2864", 0),
        ("2205", 0),
    ],
)
def test_the_limit_is_read(limit: str, granted: int) -> None:
    assert granted_bytes_in(STATUS_AND_RESERVATION + bytes.fromhex(limit)) == granted


@pytest.mark.parametrize("answer", [b"", b"\xff" * 40, b"\x22\xff\xff", b"garbage", bytes(50)])
def test_nonsense_grants_nothing(answer: bytes) -> None:
    assert granted_bytes_in(answer) == 0
