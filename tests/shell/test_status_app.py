"""The status page's HTTP side, over a real loopback socket."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import cast

import aiohttp
import pytest

from p2pdiloco.errors import UserError
from p2pdiloco_daemon.log import is_no_stranger_s_mistake
from p2pdiloco_daemon.status import app as status_app
from p2pdiloco_daemon.status import view
from p2pdiloco_daemon.status.app import BACKLOG, CONNECTIONS_MAX, build_app, serving_page

STATIC = resources.files("p2pdiloco_daemon.status").joinpath("static")


@dataclass
class Node:
    """Stands for the daemon: counts reads and settle requests."""

    name: str = "birch"
    num_reads: int = 0
    settled: list[bool] = field(default_factory=list)
    served: list[bytes] = field(default_factory=list)

    def read(self) -> view.Status:
        self.num_reads += 1
        return view.Status(
            protocol_version=1,
            app_version="0.1.0",
            peer_id="peer-a",
            node_name=self.name,
            run=view.Run(id="beef", name="test"),
            state=view.NodeState.TRAINING,
            sentence="Training.",
            uptime_s=float(self.num_reads),
        )

    async def settle(self) -> None:
        self.settled.append(True)

    def take_served(self, body: bytes) -> None:
        if body == b"garbage":
            raise UserError("report: Invalid JSON")
        self.served.append(body)


@asynccontextmanager
async def browsing(node: Node, *, settle: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    application = build_app(
        node.read,
        settle=node.settle if settle else None,
        take_served=node.take_served,
        event_interval_s=0.01,
    )
    async with (
        serving_page(application, 0) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=300)) as session,
    ):
        yield session


def browse(use: Callable[[aiohttp.ClientSession, Node], Awaitable[None]], **options: bool) -> Node:
    node = Node()

    async def run() -> None:
        async with browsing(node, **options) as session:
            await use(session, node)

    asyncio.run(run())
    return node


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, view.JsonObject]:
    """(event name, document) of the next server-sent event."""
    name, data = "message", ""
    while line := (await response.content.readline()).decode().rstrip("\n"):
        key, _, value = line.partition(": ")
        name, data = (value, data) if key == "event" else (name, value)
    return name, json.loads(data)


def test_the_page_and_its_parts_are_served_and_strictly_confined() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        for path, kind in {
            "/": "text/html",
            "/page.css": "text/css",
            "/page.js": "text/javascript",
            "/favicon.svg": "image/svg+xml",
        }.items():
            async with session.get(path) as response:
                assert (response.status, response.content_type) == (200, kind)
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"

    browse(use)


def test_the_status_is_json_read_anew_for_each_request() -> None:
    async def use(session: aiohttp.ClientSession, node: Node) -> None:
        for num_reads in (1, 2):
            async with session.get("/api/status") as response:
                assert response.content_type == "application/json"
                assert (await response.json())["uptime_s"] == num_reads

    browse(use)


def test_metrics_carry_the_prometheus_content_type() -> None:
    async def use(session: aiohttp.ClientSession, node: Node) -> None:
        node.name = "lone surrogate \ud800"
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "# TYPE p2pdiloco_merges_total counter" in await response.text()

    browse(use)


def test_events_carry_the_status_again_and_again() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        async with session.get("/api/events") as response:
            assert response.content_type == "text/event-stream"
            first = await next_event(response)
            second = await next_event(response)
        assert first[0] == second[0] == "message"
        assert first[1]["sentence"] == "Training."
        assert second[1]["uptime_s"] >= first[1]["uptime_s"]

    browse(use)


def test_an_open_stream_says_goodbye_and_does_not_hold_up_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_app, "SHUTDOWN_TIMEOUT_S", 1e6)

    async def run() -> None:
        application = build_app(Node().read, event_interval_s=3600.0)
        async with aiohttp.ClientSession() as session:
            async with serving_page(application, 0) as url:
                response = await session.get(f"{url}api/events")
                await next_event(response)
            assert (await next_event(response))[0] == "bye"
            assert await response.content.read() == b""
            response.close()

    asyncio.run(run())


def test_streams_are_bounded_and_a_closed_one_makes_room() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        streams = [await session.get("/api/events") for _ in range(status_app.EVENT_CLIENTS_MAX)]
        async with session.get("/api/events") as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"]
            assert "error" in await refused.json()
        streams.pop().close()
        async with asyncio.timeout(300):
            while (again := await session.get("/api/events")).status == 503:
                again.close()
        for stream in (*streams, again):
            stream.close()

    browse(use)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9", "127.0.0.1:8737", "[::1]:80", "[::1]"]
)
def test_loopback_names_are_answered(host: str) -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        async with session.get("/api/status", headers={"Host": host}) as response:
            assert response.status == 200

    browse(use)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[::1", "", ":80"],
)
@pytest.mark.parametrize("path", ["/", "/api/status", "/api/events", "/metrics", "/nothing"])
def test_a_rebound_name_is_refused_everywhere(host: str, path: str) -> None:
    async def use(session: aiohttp.ClientSession, node: Node) -> None:
        async with session.get(path, headers={"Host": host}) as response:
            assert response.status in ({403} if host else {400, 403})
        assert node.num_reads == 0

    browse(use)


def test_settling_needs_the_header() -> None:
    async def use(session: aiohttp.ClientSession, node: Node) -> None:
        async with session.post("/api/settle") as response:
            assert response.status == 403
            assert "X-P2PDiloco: 1" in (await response.json())["error"]
        assert node.settled == []
        async with session.post("/api/settle", headers={"X-P2PDiloco": "1"}) as response:
            assert (response.status, await response.json()) == (202, {"accepted": True})

    assert browse(use).settled == [True]


def test_a_program_that_serves_here_says_how_that_goes() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        async with session.post("/api/served", data=b"{}") as response:
            assert response.status == 403
        headers = {"X-P2PDiloco": "1"}
        async with session.post("/api/served", data=b"a report", headers=headers) as response:
            assert response.status == 202
        async with session.post("/api/served", data=b"garbage", headers=headers) as response:
            assert (response.status, await response.json()) == (
                400,
                {"error": "report: Invalid JSON"},
            )
        async with session.post("/api/served", data=bytes(70_000), headers=headers) as response:
            assert response.status == 413

    assert browse(use).served == [b"a report"]


def test_settling_through_a_rebound_name_is_refused() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        headers = {"X-P2PDiloco": "1", "Host": "evil.example"}
        async with session.post("/api/settle", headers=headers) as response:
            assert response.status == 403

    assert browse(use).settled == []


def test_another_origin_gets_no_permission_to_send_the_header() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        headers = {
            "Origin": "https://evil.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "X-P2PDiloco",
        }
        async with session.options("/api/settle", headers=headers) as response:
            assert response.status == 405
            assert not any(name.startswith("Access-Control") for name in response.headers)

    browse(use)


def test_without_a_settle_callback_there_is_nothing_to_settle() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        async with session.post("/api/settle", headers={"X-P2PDiloco": "1"}) as response:
            assert response.status == 404

    browse(use, settle=False)


def test_unknown_paths_and_wrong_methods_are_errors_in_json() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        async with session.get("/nothing") as response:
            assert (response.status, response.content_type) == (404, "application/json")
            assert "/nothing" in (await response.json())["error"]
        async with session.get("/api/settle") as response:
            assert (response.status, response.content_type) == (405, "application/json")
            assert response.headers["Allow"] == "POST"
        async with session.post("/api/status") as response:
            assert response.status == 405

    browse(use)


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    async def run() -> None:
        async with serving_page(build_app(Node().read), 0) as url:
            port = int(url.rstrip("/").rpartition(":")[2])
            with pytest.raises(UserError, match=rf"port {port} .*in use.*--port"):
                async with serving_page(build_app(Node().read), port):
                    pass

    asyncio.run(run())


def test_connections_that_are_left_open_take_neither_the_page_nor_many_files() -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        port = await port_of(session)
        left = [
            await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2 * CONNECTIONS_MAX + BACKLOG)
        ]
        async with session.get("/api/status") as response:
            assert response.status == 200
        closed = [reader for reader, _ in left if await has_ended(reader)]
        assert len(left) - len(closed) <= CONNECTIONS_MAX + BACKLOG
        for _, writer in left:
            writer.close()

    browse(use)


async def port_of(session: aiohttp.ClientSession) -> int:
    async with session.get("/") as response:
        assert response.url.port
        return response.url.port


async def has_ended(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has closed; what it has not sent by then is not waited for."""
    await asyncio.sleep(0)
    return reader.at_eof()


@pytest.mark.parametrize(
    "request_text", [b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/7\r\n\r\n", b"\0\xff\r\n\r\n"]
)
def test_a_request_that_is_no_http_is_answered_and_does_not_fill_the_log(
    request_text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", await port_of(session))
        writer.write(request_text)
        assert b"400 Bad Request" in await reader.readline()
        writer.close()

    browse(use)
    assert [r.message for r in caplog.records if is_no_stranger_s_mistake(r)] == []


def test_a_body_that_is_broken_or_broken_off_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(session: aiohttp.ClientSession, _node: Node) -> None:
        headers = {"X-P2PDiloco": "1", "Content-Encoding": "gzip"}
        async with session.post("/api/served", data=b"no gzip", headers=headers) as response:
            assert response.status == 400
            assert "not encoded" in (await response.json())["error"]
        reader, writer = await asyncio.open_connection("127.0.0.1", await port_of(session))
        head = b"POST /api/served HTTP/1.1\r\nHost: localhost\r\nX-P2PDiloco: 1\r\n"
        writer.write(head + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert b"100 Continue" in await reader.readline()  # it waits for the body now
        writer.close()
        async with session.get("/api/status") as response:
            assert response.status == 200

    browse(use)
    assert [r.message for r in caplog.records if is_no_stranger_s_mistake(r)] == []


def test_a_handler_that_fails_is_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def use(session: aiohttp.ClientSession, node: Node) -> None:
        node.name = cast(str, object())  # no JSON
        async with session.get("/api/status") as response:
            assert response.status == 500

    browse(use)
    assert [r.levelname for r in caplog.records if is_no_stranger_s_mistake(r)] == ["ERROR"]


def test_the_script_never_makes_markup_out_of_text() -> None:
    script = STATIC.joinpath("page.js").read_text()
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    )
    assert re.findall(forbidden, script) == []


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    page = STATIC.joinpath("page.html").read_text()
    style = STATIC.joinpath("page.css").read_text()
    assert re.findall(r'(?:src|href)="(?!/)[^"]*"', page) == []
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page) == []
    assert re.findall(r"url\(|@import", style) == []


def test_the_script_reads_only_names_that_the_page_has() -> None:
    page = STATIC.joinpath("page.html").read_text()
    script = STATIC.joinpath("page.js").read_text()
    used = set(re.findall(r'(?:byId|setText)\("([a-z-]+)"', script))
    assert used <= set(re.findall(r'\bid="([a-z-]+)"', page))
