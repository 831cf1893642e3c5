"""A donor that is a process: `python donor_process.py FILE` prints its URL, and ends when it is
killed or its standard input is closed.
"""

import asyncio
import sys
from pathlib import Path

from p2pdiloco_bootstrap.serving import Body, Traffic, serving_on_tcp
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage, exchange_application


class FileShelf:
    """One file, which is a state under any name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def spec(self) -> bytes:
        return b""

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        return None

    async def merge(self, fragment: int, version: int, digest: str) -> Body | None:
        return None

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        return self._path

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        return None


async def serve(path: Path) -> None:
    async with serving_on_tcp(exchange_application(FileShelf(path), Traffic())) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
