"""How nodes speak of turns to each other: the load of a worker, and turns asked for and answered.

msgpack maps with types and bounds, checked by pydantic on arrival. One websocket (`GET
/v1/rollouts/turns`) carries all turns that a node asks of another: `Ask` and `Withdraw` one way,
`Answer` and `Refusal` the other, in any order; `id` is the asker's. When it closes, all are
withdrawn. A request for each turn would take a stream each, of which peers have few.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import Count, Sentence, sentence
from p2pdiloco.protocol.turns import Held, Holding, Load, TurnId
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.trajectories import HISTORY_BYTES_MAX

LOAD_PATH = "/v1/rollouts/load"
TURNS_PATH = "/v1/rollouts/turns"

FRAME_BYTES_MAX = HISTORY_BYTES_MAX + 1024
LOAD_BYTES_MAX = 1 << 20
"""`HELD_MAX` turns of some hundred bytes."""

_Bytes = Annotated[bytes, Field(max_length=HISTORY_BYTES_MAX)]
T = TypeVar("T")


def held_path(step: int, trajectory: int) -> str:
    return f"/v1/rollouts/held/{step}/{trajectory}"


@dataclass(frozen=True, slots=True)
class Ask:
    """Play this turn; the history is a packed episode so far, or empty."""

    id: Count
    turn: TurnId
    history: _Bytes
    kind: Literal["ask"] = "ask"


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody wants the answer any more; it may cross this on the way."""

    id: Count
    kind: Literal["withdraw"] = "withdraw"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a turn; `episode` is packed, and unchecked."""

    id: Count
    held: Held
    num_reused: Count
    episode: _Bytes
    kind: Literal["answer"] = "answer"

    @property
    def played(self) -> Played:
        return Played(self.held, self.num_reused, self.episode)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a turn is not played, now or at all."""

    id: Count
    reason: Sentence
    is_busy: bool
    kind: Literal["refusal"] = "refusal"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load, under the policy of this version."""

    version: Count
    load: Load


Asked = Ask | Withdraw
Answered = Answer | Refusal

_ASKED: TypeAdapter[Asked] = TypeAdapter(Annotated[Asked, Field(discriminator="kind")])
_ANSWERED: TypeAdapter[Answered] = TypeAdapter(Annotated[Answered, Field(discriminator="kind")])
_ANSWER = TypeAdapter(Answer)
_REPORT = TypeAdapter(LoadReport)
_SAID: TypeAdapter[Asked | Answered | LoadReport] = TypeAdapter(Asked | Answered | LoadReport)
"""`asdict` would hold the loop up for a tenth of a second where a worker holds a whole step."""


def pack(message: Asked | Answered | LoadReport) -> bytes:
    return bytes(msgpack.packb(_SAID.dump_python(message), default=_value))


def unpack_asked(data: bytes) -> Asked:
    """PeerError, as of each of these, for anything that is not exactly one well-formed message."""
    return _unpacked(_ASKED, data)


def unpack_answered(data: bytes) -> Answered:
    return _unpacked(_ANSWERED, data)


def unpack_answer(data: bytes) -> Answer:
    return _unpacked(_ANSWER, data)


def unpack_load(data: bytes) -> LoadReport:
    return _unpacked(_REPORT, data)


def _value(item: object) -> object:
    assert isinstance(item, Holding)
    return item.value


def _unpacked(form: TypeAdapter[T], data: bytes) -> T:
    try:
        return form.validate_python(msgpack.unpackb(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PeerError(sentence(f"malformed words of turns: {where}: {first['msg']}")) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError(f"no words of turns: {type(error).__name__}") from error
