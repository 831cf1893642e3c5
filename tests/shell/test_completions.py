"""The dialect, over a real loopback socket, with a worker that plays a part."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from p2pdiloco_bootstrap.serving import serving_on_tcp
from p2pdiloco_daemon.rollouts import completions
from p2pdiloco_daemon.rollouts.completions import Completions
from p2pdiloco_daemon.rollouts.messages import Finished, Progressed, Refused
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy
from p2pdiloco_daemon.rollouts.worker import Answer, AnswerEvent, Died, Question, Rollouts
from p2pdiloco_daemon.status.app import COMPLETIONS_PATH


def part(text: str, *tokens: int, version: int = 4) -> Progressed:
    columns = (
        array("i", tokens),
        array("f", [-0.5] * len(tokens)),
        array("q", [version] * len(tokens)),
    )
    return Progressed(1, text, *(column.tobytes() for column in columns))


ANSWER = (part("In the ", 1, 2), part("beginning", 3, version=5), Finished(1, "length", 2))


class Worker:
    """Answers every question with the same events."""

    def __init__(self, *events: AnswerEvent, is_busy: bool = False) -> None:
        self._events = events
        self._is_busy = is_busy
        self.questions: list[Question] = []
        self.left = asyncio.Event()

    @contextmanager
    def answering(self, question: Question) -> Iterator[Answer]:
        if self._is_busy:
            raise RolloutsBusy("64 requests are in work; ask again later")
        self.questions.append(question)
        answer = Answer()
        for event in self._events:
            answer.put_nowait(event)
        try:
            yield answer
        finally:
            self.left.set()


@asynccontextmanager
async def asking(worker: Worker | None) -> AsyncIterator[aiohttp.ClientSession]:
    dialect = Completions()
    dialect.rollouts, dialect.model = cast("Rollouts", worker), "kjv"
    app = web.Application()
    app.router.add_post(COMPLETIONS_PATH, dialect.handle)
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        serving_on_tcp(app) as url,
        aiohttp.ClientSession(url, timeout=timeout) as session,
    ):
        yield session


def ask(worker: Worker | None, **body: object) -> tuple[int, dict[str, object]]:
    async def run() -> tuple[int, dict[str, object]]:
        async with (
            asking(worker) as session,
            session.post(COMPLETIONS_PATH, json={"prompt": "In", **body}) as response,
        ):
            return response.status, await response.json()

    return asyncio.run(run())


def stream(worker: Worker) -> list[str]:
    """The data of each event."""

    async def run() -> list[str]:
        body = {"prompt": [7, 8], "stream": True}
        async with (
            asking(worker) as session,
            session.post(COMPLETIONS_PATH, json=body) as response,
        ):
            assert response.content_type == "text/event-stream"
            events = (await response.text()).strip().split("\n\n")
            return [event.removeprefix("data: ") for event in events]

    return asyncio.run(run())


def test_an_answer_has_text_tokens_versions_and_usage() -> None:
    status, answer = ask(Worker(*ANSWER), seed=3, logprobs=0)
    assert status == 200
    assert (answer["object"], answer["model"], answer["seed"]) == ("text_completion", "kjv", 3)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "In the beginning",
            "finish_reason": "length",
            "token_ids": [1, 2, 3],
            "policy_versions": [4, 4, 5],
            "logprobs": {
                "tokens": ["token_id:1", "token_id:2", "token_id:3"],
                "token_logprobs": [-0.5, -0.5, -0.5],
                "top_logprobs": None,
                "text_offset": None,
            },
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_what_is_asked_reaches_the_worker() -> None:
    worker = Worker(*ANSWER)
    ask(worker, prompt=[7, 8], stop="x", max_tokens=9, temperature=0.5, top_k=3, seed=1)
    assert worker.questions == [
        Question(
            prompt_tokens=array("i", [7, 8]).tobytes(),
            stops='["x"]',
            num_tokens_max=9,
            temperature=0.5,
            top_k=3,
            seed=1,
        )
    ]


def test_a_stream_has_a_part_per_event_the_end_and_done() -> None:
    *events, end, done = stream(Worker(*ANSWER))
    assert [json.loads(event)["choices"][0]["text"] for event in events] == ["In the ", "beginning"]
    assert json.loads(end)["choices"][0]["finish_reason"] == "length"
    assert json.loads(end)["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"


def test_a_worker_that_dies_in_mid_stream_is_told_of() -> None:
    *_, last = stream(Worker(ANSWER[0], Died("the rollout worker ended: killed by SIGKILL", 1.0)))
    assert "killed by SIGKILL; it is started again" in json.loads(last)["error"]["message"]


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([Refused(1, "the prompt is too long", is_busy=False)], 400),
        ([Refused(1, "32 requests wait", is_busy=True)], 503),
        ([Died("the rollout worker ended", 1.0)], 503),
    ],
)
def test_a_refusal_of_the_worker_has_its_status(events: Sequence[AnswerEvent], status: int) -> None:
    got, answer = ask(Worker(*events))
    assert got == status
    assert cast("Refused", events[0]).reason in str(answer["error"])


def test_a_node_that_starts_or_is_busy_says_so() -> None:
    for worker, reason in ((None, "is starting"), (Worker(is_busy=True), "in work")):
        status, answer = ask(worker)
        assert status == 503
        assert reason in str(answer["error"])


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"prompt": ""}, "prompt: it is empty"),
        ({"n": 2}, "n: Input should be 1"),
        ({"prompt": [-1]}, "prompt: expected a text, or token ids of 0 and more"),
        ({"stop": list("abcde")}, "stop: expected a text of 1 to 256 characters, or at most 4"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-320}, "expected 0, or at least 0.001"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"maxtokens": 3}, "maxtokens: Extra inputs"),
    ],
)
def test_a_wrong_question_is_told_what_is_wrong(wrong: dict[str, object], where: str) -> None:
    worker = Worker()
    status, answer = ask(worker, **wrong)
    assert status == 400
    assert where in str(answer["error"])
    assert not worker.questions


def test_a_question_that_never_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "READ_TIMEOUT_S", 0.2)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with asking(Worker()) as session:
            headers = {"Content-Type": "application/json"}
            async with session.post(COMPLETIONS_PATH, data=endless(), headers=headers) as response:
                assert response.status == 408
                assert "did not arrive" in await response.text()

    asyncio.run(run())


def test_a_client_that_goes_away_ends_its_answer() -> None:
    async def run() -> None:
        worker = Worker(ANSWER[0])
        async with asking(worker) as session:
            body = {"prompt": "In", "stream": True}
            response = await session.post(COMPLETIONS_PATH, json=body)
            await response.content.readline()
            response.close()
            async with asyncio.timeout(300):
                await worker.left.wait()

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "WRITE_TIMEOUT_S", 0.2)

    async def run() -> None:
        worker = Worker(*[part("a" * (1 << 20), 1)] * 64)
        transports: list[asyncio.Transport | None] = []
        dialect = Completions()
        dialect.rollouts = cast("Rollouts", worker)

        async def handle(request: web.Request) -> web.StreamResponse:
            transports.append(request.transport)
            return await dialect.handle(request)

        app = web.Application()
        app.router.add_post(COMPLETIONS_PATH, handle)
        body = json.dumps({"prompt": "In", "stream": True})
        async with asyncio.timeout(300), serving_on_tcp(app) as url:
            _, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
            head = f"POST {COMPLETIONS_PATH} HTTP/1.1\r\nHost: here\r\n"
            kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write((head + kind + body).encode())
            await worker.left.wait()
            await asyncio.sleep(0)
            [transport] = transports
            assert transport is not None and transport.is_closing()
            assert not transport.get_write_buffer_size()
            writer.close()

    asyncio.run(run())


def test_a_client_that_does_not_take_the_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = web.StreamResponse.write_eof

    async def never_taken(response: web.StreamResponse, data: bytes = b"") -> None:
        if type(response) is web.StreamResponse:
            await asyncio.Event().wait()
        await ended(response, data)

    monkeypatch.setattr(completions, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(web.StreamResponse, "write_eof", never_taken)

    async def run() -> None:
        worker = Worker(*ANSWER)
        async with asking(worker) as session, asyncio.timeout(300):
            body = {"prompt": "In", "stream": True}
            async with session.post(COMPLETIONS_PATH, json=body):
                await worker.left.wait()

    asyncio.run(run())
