"""A shelf with nothing on it; a benchmark puts on what it serves."""

from p2pdiloco_bootstrap.serving import Body
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage


class EmptyShelf:
    """What `exchange_application` reads from."""

    async def spec(self) -> bytes:
        return b""

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        return None

    async def merge(self, fragment: int, version: int, digest: str) -> Body | None:
        return None

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        return None

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        return None
