"""How bodies leave."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from p2pdiloco_bootstrap.serving import (
    FilePart,
    Traffic,
    new_application,
    send_body,
    serving_on_tcp,
)


def test_a_file_that_has_become_shorter_ends_the_answer(tmp_path: Path) -> None:
    path, traffic = tmp_path / "state", Traffic()
    path.write_bytes(b"ten bytes.")

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_body(request, FilePart(path, 4, 100), "state", traffic)

    async def main() -> None:
        app = new_application(1000)
        app.router.add_get("/", answer)
        async with (
            asyncio.timeout(300),
            serving_on_tcp(app) as url,
            aiohttp.ClientSession() as session,
            session.get(url) as response,
        ):
            with pytest.raises((aiohttp.ClientPayloadError, ConnectionError)):
                await response.read()

    asyncio.run(main())
    assert traffic.up == {"state": 6}
