"""`POST /v1/completions`: the model that this node trains, in the dialect of OpenAI's completions.

One prompt, one choice. Beyond the dialect: `top_k`; `trajectory`, which with seed and position
names the noise, so that the same question has the same answer at any time under one policy;
`token_ids` and `policy_versions` beside the text, for those who train on it. Log-probabilities are
in the trainer's convention (`p2pdiloco.rollout.sampling`).

    200    the answer, or with `stream` a stream of server-sent events, ended by `[DONE]`
    400    what is wrong with the question     413   too large     415   not JSON
    408    the question does not arrive
    503    too busy, or the worker is starting; `Retry-After` says when to ask again

A client that goes away ends its answer.
"""

import asyncio
import json
import secrets
import time
from array import array
from collections.abc import Awaitable
from typing import Annotated, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from p2pdiloco_daemon.rollouts.messages import Finished, Progressed, Refused
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy
from p2pdiloco_daemon.rollouts.worker import (
    Answer,
    AnswerEvent,
    Died,
    Question,
    Rollouts,
)
from p2pdiloco_daemon.status.view import JsonObject

LOOK_S = 0.5
"""Between looks at whether the client is still there, when nothing comes."""
READ_TIMEOUT_S = 30.0
"""For a question to arrive whole; it has a place of others until then."""
WRITE_TIMEOUT_S = 10.0
"""A client that takes no byte for this long has gone."""
RETRY_AFTER_S = 2

TEMPERATURE_MIN = 0.001

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class CompletionRequest(BaseModel):
    """The body. What the dialect has and we have not may be said only with its neutral value."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | list[TokenId] = Field(description="a text, or token ids of 0 and more")
    model: str | None = None
    """Any name: there is one model."""
    max_tokens: int = Field(default=16, ge=1, le=1 << 20)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=1 << 31)
    """0 for all."""
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    """None draws one, which the answer names."""
    trajectory: str = Field(default="", max_length=256)
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = Field(
        default=None, description="a text of 1 to 256 characters, or at most 4 of them"
    )
    logprobs: int | None = Field(default=None, ge=0, le=1)
    """Any number gives those of the chosen tokens."""
    stream: bool = False
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: None = None
    logit_bias: None = None
    presence_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] = 0
    frequency_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] = 0
    stream_options: dict[str, bool] | None = None
    """Usage comes with the last event in any case."""
    user: str | None = None

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        """Logits are divided by it; far below, that is infinite, which JSON has no word for."""
        if 0 < temperature < TEMPERATURE_MIN:
            raise ValueError(f"expected 0, or at least {TEMPERATURE_MIN}")
        return temperature

    def question(self, seed: int) -> Question:
        is_text = isinstance(self.prompt, str)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Question(
            prompt=self.prompt if isinstance(self.prompt, str) else "",
            prompt_tokens=b"" if is_text else array("i", map(int, self.prompt)).tobytes(),
            trajectory=self.trajectory,
            num_tokens_max=self.max_tokens,
            seed=seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stops=json.dumps(stops),
        )


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Completions:
    """The handler, on the page's port and over the swarm's transport."""

    def __init__(self) -> None:
        self.rollouts: Rollouts | None = None
        """None until the node knows its run."""
        self.model = ""
        """The run's name."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            return _error(415, "send the question as application/json")
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                question = await request.read()
        except TimeoutError:
            return _error(408, f"the question did not arrive within {READ_TIMEOUT_S:.0f} s")
        try:
            wanted = CompletionRequest.model_validate_json(question)
        except ValidationError as error:
            return _error(400, _described(error))
        if not wanted.prompt:
            return _error(400, "prompt: it is empty; the model needs one token at least")
        if self.rollouts is None:
            return _error(503, "the node is starting; ask again in some seconds")
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        try:
            with self.rollouts.answering(wanted.question(seed)) as answer:
                return await self._answered(request, wanted, seed, answer)
        except RolloutsBusy as error:
            return _error(503, str(error))
        except ClientGone:
            if request.transport is not None:  # it may be there, and take nothing
                request.transport.abort()
            return web.Response(status=499, reason="Client Closed Request")

    async def _answered(
        self, request: web.Request, wanted: CompletionRequest, seed: int, answer: Answer
    ) -> web.StreamResponse:
        first = await _next(request, answer)
        if isinstance(first, Refused):
            return _error(503 if first.is_busy else 400, first.reason)
        reply = _Reply(self.model, wanted, seed)
        if wanted.stream:
            return await _streamed(request, reply, first, answer)
        event: AnswerEvent = first
        while isinstance(event, Progressed):
            reply.add(event)
            event = await _next(request, answer)
        if isinstance(event, Finished):
            return web.json_response(reply.document(event))
        return _error(503, _ended(event))


class _Reply:
    """An answer as documents of the dialect."""

    def __init__(self, model: str, wanted: CompletionRequest, seed: int) -> None:
        self._head: JsonObject = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "seed": seed,
        }
        self._with_logprobs = wanted.logprobs is not None
        self._num_tokens = 0
        self._parts: list[Progressed] = []

    def add(self, part: Progressed) -> None:
        self._parts.append(part)
        self._num_tokens += len(part.tokens) // 4

    def chunk(self, part: Progressed) -> JsonObject:
        """What is new."""
        self._num_tokens += len(part.tokens) // 4
        return self._head | {"choices": [self._choice([part], None)]}

    def document(self, end: Finished) -> JsonObject:
        """All that was added, and how it ended."""
        return self._head | {
            "choices": [self._choice(self._parts, end.reason)],
            "usage": {
                "prompt_tokens": end.prompt_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": end.prompt_tokens + self._num_tokens,
            },
        }

    def _choice(self, parts: list[Progressed], reason: str | None) -> JsonObject:
        tokens = [t for part in parts for t in array("i", part.tokens)]
        choice: JsonObject = {
            "index": 0,
            "text": "".join(part.text for part in parts),
            "finish_reason": reason,
            "logprobs": None,
            "token_ids": tokens,
            "policy_versions": [v for part in parts for v in array("q", part.versions)],
        }
        if self._with_logprobs:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [p for part in parts for p in array("f", part.logprobs)],
                "top_logprobs": None,
                "text_offset": None,
            }
        return choice


async def _streamed(
    request: web.Request, reply: _Reply, event: AnswerEvent, answer: Answer
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while isinstance(event, Progressed):
        await _write(response, reply.chunk(event))
        event = await _next(request, answer)
    if isinstance(event, Finished):
        await _write(response, reply.document(event))
        await _write_line(response, "[DONE]")
    else:
        await _write(response, _error_document(503, _ended(event)))
    await _taken(response.write_eof())
    return response


async def _write(response: web.StreamResponse, document: JsonObject) -> None:
    await _write_line(response, json.dumps(document, separators=(",", ":")))


async def _write_line(response: web.StreamResponse, data: str) -> None:
    await _taken(response.write(f"data: {data}\n\n".encode()))


async def _taken(sending: Awaitable[None]) -> None:
    """Until the client has taken it, or has gone (ClientGone)."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await sending
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone from error


async def _next(request: web.Request, answer: Answer) -> AnswerEvent:
    """The next event; ClientGone once nobody waits for it."""
    while True:
        if request.transport is None or request.transport.is_closing():
            raise ClientGone
        try:
            async with asyncio.timeout(LOOK_S):
                return await answer.get()
        except TimeoutError:
            pass


def _ended(event: AnswerEvent) -> str:
    assert isinstance(event, Died | Refused)
    return f"{event.reason}; it is started again: ask again in some seconds"


def _described(error: ValidationError) -> str:
    """The first mistake: where, and what was expected. Of what may have several forms pydantic
    tells a mistake of each."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = CompletionRequest.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    if field and field.description and first["type"] != "missing":
        return f"{first['loc'][0]}: expected {field.description}"
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def _error_document(status: int, message: str) -> JsonObject:
    kind = "invalid_request_error" if status < 500 else "overloaded_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return web.json_response(_error_document(status, message), status=status, headers=headers)
