"""States that are being fetched: what has arrived outlives failed fetches and the process."""

import logging
from dataclasses import dataclass

from p2pdiloco.errors import StoreError
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco_daemon.fetch import Gathering
from p2pdiloco_daemon.storage.disk_queue import DiskQueue
from p2pdiloco_daemon.storage.part_files import PartFiles, PartInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arriving:
    """A state that is being fetched, or was when the donors failed or this node died."""

    part: PartInfo
    body: Gathering


class Arrivals:
    """What is here of states that are being fetched. On disk it grows with them."""

    def __init__(self, files: PartFiles, disk: DiskQueue) -> None:
        self._files = files
        self._disk = disk
        self._arriving: dict[int, Arriving] = {}

    async def gathering(self, fragment: int, part: PartInfo) -> Gathering:
        """What is here of a state that is about to be fetched, perhaps nothing; it is kept as it
        grows.
        """
        known = self._arriving.get(fragment)
        if known and known.part == part:
            return known.body
        body = Gathering(part.num_bytes)
        if body.num_chunks > 1:  # else there is nothing to go on with
            body.on_chunk = lambda chunk: self._keep_chunk(fragment, part, body, chunk)
            found = await self._disk.run(self._open, fragment, part, memoryview(body.data))
            body.add_kept(found)
        self._arriving[fragment] = Arriving(part, body)
        return body

    def drop(self, fragment: int) -> None:
        """It is whole, or what has arrived is wrong."""
        self._arriving.pop(fragment, None)
        self._disk.save(_name(fragment), self._files.drop, fragment)

    def reached(self, fragment: int, version: int) -> None:
        """The fragment has come to `version` by merges: an older state is of no use any more."""
        arriving = self._arriving.get(fragment)
        if arriving and arriving.part.version <= version:
            self.drop(fragment)

    def begun(self, fragment: int) -> SnapshotInfo | None:
        """The state of which something is here already. Blocks."""
        arriving = self._arriving.get(fragment)
        part = arriving.part if arriving else self._files.info(fragment)
        return SnapshotInfo(part.version, part.state_digest) if part else None

    def _open(self, fragment: int, part: PartInfo, place: memoryview) -> list[tuple[int, int]]:
        try:
            if self._files.info(fragment) == part:
                return self._files.read(fragment, part, place)
            self._files.begin(fragment, part)
        except StoreError as error:
            logger.warning("%s", error)
        return []

    def _keep_chunk(self, fragment: int, part: PartInfo, body: Gathering, chunk: int) -> None:
        if not self._disk.is_busy:  # a chunk may be fetched again
            span = body.span(chunk)
            data = memoryview(body.data)[span]
            keep = self._files.save_chunk
            self._disk.save(_name(fragment), keep, fragment, part.version, span.start, data)


def _name(fragment: int) -> str:
    return f"arriving state of fragment {fragment}"
