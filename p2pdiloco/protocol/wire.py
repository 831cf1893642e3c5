"""Control messages between nodes, and their bytes.

One msgpack map per message, at most `MESSAGE_BYTES_MAX`; every field has a type and a bound,
checked by pydantic on arrival. The sender is not in the message: the transport says who sent it,
authenticated. Tensor bytes never travel in messages.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.naming import (
    Count,
    Digest,
    FragmentIndex,
    MixPart,
    PeerText,
    RoundId,
    Seconds,
    Sentence,
    sentence,
)

PROTOCOL_VERSION = 1
"""Raised whenever two nodes of different versions could not take part in the same run."""
MESSAGE_BYTES_MAX = 64 * 1024
"""A heartbeat of a run with `FRAGMENTS_MAX` fragments and `SIGHTINGS_MAX` sightings fits."""
SIGHTINGS_MAX = 64
"""Liveness news that one heartbeat passes on: in a swarm of 1,000 each member is named by some
heartbeat within seconds.
"""
FRAGMENTS_MAX = 400
"""Their heads and counters must fit into a heartbeat."""
NAME_CHARS_MAX = 64
NodeName = Annotated[str, Field(max_length=NAME_CHARS_MAX, pattern=r"^\P{Cc}*$")]


class Head(NamedTuple):
    """The newest version of a fragment that a node holds; version -1 while it holds none. Without
    names of fields on the wire, since every heartbeat has one for each fragment.
    """

    version: Annotated[int, Field(ge=-1, lt=2**53)]
    digest: Digest
    tokens_total: Count

    @property
    def weight(self) -> tuple[int, int]:
        """Comparable with `Record.weight`."""
        return self.tokens_total, -int(self.digest, 16) if self.tokens_total else 0


class Sighting(NamedTuple):
    """`peer` was heard of at its heartbeat number `sequence`; passed on as gossip, without names of
    fields on the wire: most of what a node of a large swarm sends is this.

    What it said then of its part in rounds goes along: in a swarm where few hear it themselves, all
    must still reach the same order of candidates.
    """

    peer: PeerText
    incarnation: Count
    sequence: Count
    ready: bool = False
    uplink_mb_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a node says about itself every second, and whom it has heard of.

    `incarnation` grows at each restart of the node, `sequence` at each heartbeat. `local_steps` are
    inner steps per fragment since it last received it: the metadata of Decoupled DiLoCo (1.3).
    `step_s` is 0 while no learner steps. `attempts` are the highest seen in the term of the next
    version of each fragment. `asks_for_time` are fragments of which a sync would disturb what
    shares this machine just now; empty unless the run is paced.
    """

    run_id: Annotated[str, Field(max_length=64)]
    protocol_version: Count
    incarnation: Count
    sequence: Count
    name: NodeName
    ready: bool
    uplink_mb_s: Seconds
    step_s: Seconds
    tokens_per_s: Seconds
    local_steps: Annotated[tuple[Count, ...], Field(max_length=FRAGMENTS_MAX)]
    heads: Annotated[tuple[Head, ...], Field(max_length=FRAGMENTS_MAX)]
    sightings: Annotated[tuple[Sighting, ...], Field(max_length=SIGHTINGS_MAX)]
    attempts: Annotated[tuple[Count, ...], Field(max_length=FRAGMENTS_MAX)] = ()
    asks_for_time: Annotated[tuple[FragmentIndex, ...], Field(max_length=FRAGMENTS_MAX)] = ()
    kind: Literal["heartbeat"] = "heartbeat"

    @property
    def number(self) -> tuple[int, int]:
        """Grows with each heartbeat of a node, across its restarts."""
        return self.incarnation, self.sequence


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """The synchronizer asks for outer gradients against the version with digest `parent`."""

    round: RoundId
    parent: Digest
    kind: Literal["round_opened"] = "round_opened"


@dataclass(frozen=True, slots=True)
class ContributionReady:
    """A contributor's report: its outer gradient lies ready to be pulled."""

    round: RoundId
    steps: Annotated[int, Field(ge=1, lt=2**40)]
    tokens: Annotated[int, Field(ge=1, lt=2**50)]
    num_bytes: Annotated[int, Field(ge=1, lt=2**40)]
    step_s: Seconds
    kind: Literal["contribution_ready"] = "contribution_ready"


@dataclass(frozen=True, slots=True)
class RoundDeclined:
    """A member will not contribute to this round, and why; `attempt` is the highest that it has
    seen in this term.
    """

    round: RoundId
    reason: Sentence
    attempt: Count = 0
    kind: Literal["round_declined"] = "round_declined"


@dataclass(frozen=True, slots=True)
class Committed:
    """A merge record, on its way to everybody."""

    record: Record
    kind: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True)
class Left:
    """The sender leaves; nobody need wait for it."""

    kind: Literal["left"] = "left"


LinkStage = Literal["open", "half", "whole", "void"]
"""The sender's vector lies ready; it has the receiver's, too; it knows that the receiver has its
own, and counts the exchange; it does not count the exchange.
"""


class Link(NamedTuple):
    """How an exchange of vectors with the receiver stands, seen from the sender. Without names of
    fields on the wire.

    `weight` is what the sender's row of the mixing matrix gives the receiver; the smaller of both
    counts. `stage` is how far it got.
    """

    fragment: FragmentIndex
    round: Annotated[int, Field(ge=0, lt=2**53)]
    part: MixPart
    stage: LinkStage
    weight: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Mixing:
    """Where the exchanges of gossip with the receiver stand."""

    links: Annotated[tuple[Link, ...], Field(min_length=1, max_length=2 * FRAGMENTS_MAX)]
    kind: Literal["mixing"] = "mixing"


Message = Heartbeat | RoundOpened | ContributionReady | RoundDeclined | Committed | Left | Mixing
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def pack(message: Message) -> bytes:
    return bytes(msgpack.packb(_MESSAGE.dump_python(message)))


def unpack(data: bytes | memoryview) -> Message:
    """Raises PeerError for anything that is not exactly one well-formed message."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise PeerError(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES_MAX} are read")
    try:
        return _MESSAGE.validate_python(msgpack.unpackb(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PeerError(sentence(f"a malformed message: {where}: {first['msg']}")) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError(f"not a message: {type(error).__name__}") from error
