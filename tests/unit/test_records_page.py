"""What a donor says of its merge records and snapshots, as bytes from a stranger."""

import msgpack
import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.lineage import RECORDS_KEPT
from p2pdiloco_bootstrap.shelf import VERSION_MAX, RecordsPage

DIGEST = "ab" * 32


def test_a_page_survives_the_way() -> None:
    page = RecordsPage((b"1", b"2"), ((0, DIGEST), (VERSION_MAX, DIGEST)))
    assert RecordsPage.unpack(page.pack()) == page


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgpack.packb([]),
        msgpack.packb({"records": [], "snapshots": 7}),
        msgpack.packb({"records": ["text"], "snapshots": []}),
        msgpack.packb({"records": [b""] * (RECORDS_KEPT + 1), "snapshots": []}),
        msgpack.packb({"records": [], "snapshots": [[1]]}),
        msgpack.packb({"records": [], "snapshots": [["1", DIGEST]]}),
        msgpack.packb({"records": [], "snapshots": [[-1, DIGEST]]}),
        msgpack.packb({"records": [], "snapshots": [[VERSION_MAX + 1, DIGEST]]}),
        msgpack.packb({"records": [], "snapshots": [[1, "no digest"]]}),
        msgpack.packb({"records": [], "snapshots": [[1, DIGEST + "\n"]]}),
        msgpack.packb({"records": [], "snapshots": [[1, "../" * 21 + "a"]]}),
    ],
)
def test_anything_else_is_a_peers_fault(page: bytes) -> None:
    with pytest.raises(PeerError, match="expected a page of merge records"):
        RecordsPage.unpack(page)
