"""What this node hands out to its peers: the server's view of its holdings and its chains."""

from p2pdiloco.protocol.naming import RoundId
from p2pdiloco.protocol.node import Node
from p2pdiloco_bootstrap.serving import Body
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage
from p2pdiloco_daemon.storage.holdings import Holdings


class NodeShelf:
    """A `p2pdiloco_bootstrap.shelf.Shelf`."""

    def __init__(self, signed_spec: bytes, node: Node, holdings: Holdings) -> None:
        self._signed_spec = signed_spec
        self._node = node
        self._holdings = holdings

    async def spec(self) -> bytes:
        return self._signed_spec

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        """The newest records, far enough back to vouch for the newest snapshot on offer; older
        ones are for those who begin further back anyhow.
        """
        if not self._knows(fragment):
            return None
        snapshots = await self._holdings.disk.run(self._holdings.snapshots, fragment)
        oldest = min([since, *(snapshot.version - 1 for snapshot in snapshots[:1])])
        records = self._node.records_after(fragment, oldest)
        await self._holdings.written()
        return RecordsPage(
            tuple(record.pack() for record in records),
            tuple((snapshot.version, snapshot.state_digest) for snapshot in snapshots),
        )

    async def merge(self, fragment: int, version: int, digest: str) -> Body | None:
        known = self._knows(fragment)
        return await self._holdings.read_merge(fragment, version, digest) if known else None

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        known = self._knows(fragment)
        return await self._holdings.state_body(fragment, version, digest) if known else None

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        """To the synchronizer that asked for it, nobody else."""
        if not self._knows(fragment):
            return None
        offer = self._node.state.registers[fragment].offer
        kept = self._holdings.contribution(RoundId(fragment, version, term, attempt))
        if kept is None or offer is None or offer.synchronizer != peer:
            return None
        return Contribution(kept.steps, kept.tokens, kept.payload)

    def _knows(self, fragment: int) -> bool:
        return fragment < len(self._node.state.registers)
