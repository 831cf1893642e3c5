"""A trajectory as it is learnt from, checked and sent: tokens, and who chose which of them how.

On the wire a msgpack map: a few names and numbers, tokens and log-probabilities as little-endian
bytes. What arrives is checked for form here, for truth in `checks.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import sentence

EPISODE_TOKENS_MAX = 1 << 17
"""More than any model that volunteers run reads; bounds what a peer can make us allocate."""
ANSWERS_MAX = 1024
EPISODE_BYTES_MAX = 16 * EPISODE_TOKENS_MAX
"""Four bytes per token, at most eight per generated one, and the rest."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the policy: the tokens of the episode from `start` on that it chose."""

    start: int
    logprobs: tuple[float, ...]
    """In the trainer's convention, when they were chosen."""
    versions: tuple[int, ...]
    """Of the policy that chose each."""

    @property
    def end(self) -> int:
        return self.start + len(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A trajectory that has ended, or so far. Its tokens that no answer covers were written by the
    environment, and none is learnt from."""

    step: int
    trajectory: int
    tokens: tuple[int, ...]
    answers: tuple[Answer, ...]
    reward: float
    is_cut: bool = False
    """It came to a limit before the environment ended it; then its reward is 0."""

    @property
    def num_generated(self) -> int:
        return sum(len(answer.logprobs) for answer in self.answers)

    @property
    def oldest_version(self) -> int:
        """Of the policies that chose tokens of it."""
        return min(version for answer in self.answers for version in answer.versions)

    def chosen(self) -> Iterator[tuple[int, float, int]]:
        """(position, log-probability, version) of each generated token."""
        for answer in self.answers:
            positions = range(answer.start, answer.end)
            yield from zip(positions, answer.logprobs, answer.versions, strict=True)


_Number = Annotated[int, Field(ge=0, lt=2**53)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    step: _Number
    trajectory: _Number
    tokens: bytes = Field(max_length=4 * EPISODE_TOKENS_MAX)
    starts: list[_Number] = Field(min_length=1, max_length=ANSWERS_MAX)
    ends: list[_Number] = Field(min_length=1, max_length=ANSWERS_MAX)
    logprobs: bytes = Field(max_length=4 * EPISODE_TOKENS_MAX)
    versions: bytes = Field(max_length=4 * EPISODE_TOKENS_MAX)
    reward: float = Field(ge=0, le=1)
    is_cut: bool


def pack(episode: Episode) -> bytes:
    chosen = list(episode.chosen())
    wire = _Wire(
        step=episode.step,
        trajectory=episode.trajectory,
        tokens=np.array(episode.tokens, "<u4").tobytes(),
        starts=[answer.start for answer in episode.answers],
        ends=[answer.end for answer in episode.answers],
        logprobs=np.array([logprob for _, logprob, _ in chosen], "<f4").tobytes(),
        versions=np.array([version for _, _, version in chosen], "<u4").tobytes(),
        reward=episode.reward,
        is_cut=episode.is_cut,
    )
    return bytes(msgpack.packb(wire.model_dump()))


def unpack(data: bytes | memoryview) -> Episode:
    """PeerError for anything that is not exactly one well-formed episode: answers in order, apart
    from each other, after a prompt and within the tokens, each with finite log-probabilities."""
    if len(data) > EPISODE_BYTES_MAX:
        raise PeerError(f"an episode of {len(data)} bytes; at most {EPISODE_BYTES_MAX} are read")
    try:
        wire = _Wire.model_validate(msgpack.unpackb(data))
        return _from_wire(wire)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PeerError(sentence(f"a malformed episode: {where}: {first['msg']}")) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError(sentence(f"a malformed episode: {error}")) from error


def _from_wire(wire: _Wire) -> Episode:
    tokens = np.frombuffer(wire.tokens, "<u4").tolist()
    logprobs = np.frombuffer(wire.logprobs, "<f4")
    versions = np.frombuffer(wire.versions, "<u4").tolist()
    spans = list(zip(wire.starts, wire.ends, strict=True))
    edges = [0, *(edge for span in spans for edge in span)]
    in_order = all(start < end for start, end in spans) and edges == sorted(edges)
    if not in_order or edges[1] == 0 or edges[-1] > len(tokens):
        raise ValueError(f"answers {spans[:3]} of {len(tokens)} tokens")
    num_generated = sum(end - start for start, end in spans)
    if len(logprobs) != num_generated or len(versions) != num_generated:
        raise ValueError(f"{len(logprobs)} log-probabilities of {num_generated} tokens")
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        raise ValueError("log-probabilities that are none")
    answers, taken = [], 0
    for start, end in spans:
        part = slice(taken, taken + end - start)
        taken = part.stop
        answers.append(Answer(start, tuple(logprobs[part].tolist()), tuple(versions[part])))
    return Episode(
        step=wire.step,
        trajectory=wire.trajectory,
        tokens=tuple(tokens),
        answers=tuple(answers),
        reward=wire.reward,
        is_cut=wire.is_cut,
    )
