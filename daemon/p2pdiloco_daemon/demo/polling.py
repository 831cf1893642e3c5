"""What the nodes say about themselves, read over their loopback pages."""

import asyncio
from collections.abc import Sequence

import aiohttp

from p2pdiloco_daemon.demo.processes import NodeProcess
from p2pdiloco_daemon.status.app import ACTION_HEADER
from p2pdiloco_daemon.status.view import JsonObject

_READ_TIMEOUT = aiohttp.ClientTimeout(total=2)
"""A page answers from memory; a node that takes longer is shown with its last status."""


class StatusReader:
    """Keeps the newest status of each node, by name; a node that died keeps its last one."""

    def __init__(self, session: aiohttp.ClientSession, nodes: Sequence[NodeProcess]) -> None:
        self.latest: dict[str, JsonObject] = {}
        self._session = session
        self._nodes = nodes

    async def refresh(self) -> None:
        """Asks every node once, all at the same time."""
        async with asyncio.TaskGroup() as tasks:
            for node in self._nodes:
                tasks.create_task(self._read(node), name=f"status of {node.name}")

    async def settle(self) -> None:
        """Asks every living node to stop training and come to rest."""
        async with asyncio.TaskGroup() as tasks:
            for node in self._nodes:
                tasks.create_task(self._settle(node), name=f"settle {node.name}")

    def settled(self) -> bool:
        """Whether all living nodes rest on the same, newest version of every fragment."""
        living = [self.latest.get(node.name) for node in self._nodes if node.end is None]
        heads = [_heads(status) for status in living if status and status["state"] == "settled"]
        return len(heads) == len(living) and all(head == heads[0] for head in heads)

    async def _read(self, node: NodeProcess) -> None:
        if node.end is not None:
            return
        try:
            async with self._session.get(_url(node, "status"), timeout=_READ_TIMEOUT) as response:
                if response.status == 200:
                    self.latest[node.name] = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return  # starting, busy or dying: the table goes on showing the last status

    async def _settle(self, node: NodeProcess) -> None:
        if node.end is not None:
            return
        try:
            url, headers = _url(node, "settle"), {ACTION_HEADER: "1"}
            async with self._session.post(url, headers=headers, timeout=_READ_TIMEOUT):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return  # `settled` will not see it settled, and the verdict says so


def _heads(status: JsonObject) -> list[tuple[int, int, str | None]]:
    return [
        (fragment["version"], fragment["head_version"], fragment["record_digest"])
        for fragment in status["fragments"]
    ]


def _url(node: NodeProcess, name: str) -> str:
    return f"http://127.0.0.1:{node.port}/api/{name}"
