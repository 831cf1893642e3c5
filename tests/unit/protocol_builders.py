"""Short words for the tests of the core: peers, records, chains, heartbeats, and a node among them.

The fake signature is a hash, so that anybody can make any; tests forge it on purpose.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.lineage import Chain, Contributor, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.state import NodeConfig
from p2pdiloco.protocol.topology import GossipPlan
from p2pdiloco.protocol.wire import (
    PROTOCOL_VERSION,
    Committed,
    ContributionReady,
    Head,
    Heartbeat,
    Message,
    RoundOpened,
)

A, B, C, D, BOOT = (PeerId(name) for name in ("anna", "bert", "cleo", "dora", "boot"))
RUN = "run"
TIMES = SyncTimes(inner_steps=12, num_fragments=2, overlap_steps=2, quorum=1, grace_factor=0.8)


def digest(*of: object) -> str:
    return hashlib.blake2b(repr(of).encode(), digest_size=32).hexdigest()


GENESIS = (digest("genesis", 0), digest("genesis", 1))


@dataclass(frozen=True)
class FakeSigner:
    me: PeerId

    def sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(self.me.encode() + data, digest_size=16).digest()

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return FakeSigner(peer).sign(data) == signature


def signed(record: Record) -> Record:
    return record.signed(FakeSigner(record.synchronizer))


def make_record(
    after: Record | None = None,
    tokens: dict[PeerId, int] | None = None,
    *,
    synchronizer: PeerId = B,
    fragment: int = 0,
    branch: str = "main",
    **changes: Any,
) -> Record:
    """The record that follows `after` (genesis if None); `branch` tells siblings apart."""
    version = after.version + 1 if after else 1
    parts = {B: 100, C: 100} if tokens is None else tokens
    record = Record(
        run_id=RUN,
        fragment=fragment,
        version=version,
        parent=after.digest if after else GENESIS[fragment],
        payload_digest=digest("payload", branch, version),
        payload_bytes=1000,
        state_digest=digest("state", branch, version),
        contributors=tuple(Contributor(peer, n, 10) for peer, n in parts.items()),
        refused=(),
        term=(version - 1) // 4,
        attempt=0,
        tokens_total=(after.tokens_total if after else 0) + sum(parts.values()),
        reason="all 2 of 2 invited have answered",
        synchronizer=synchronizer,
    )
    return signed(replace(record, **changes))


def make_records(
    num: int, after: Record | None = None, *, fragment: int = 0, branch: str = "main", **each: Any
) -> list[Record]:
    records: list[Record] = []
    for _ in range(num):
        before = records[-1] if records else after
        records.append(make_record(before, fragment=fragment, branch=branch, **each))
    return records


def make_chain(records: Sequence[Record] = (), fragment: int = 0) -> Chain:
    return Chain(0, GENESIS[fragment], list(records))


def head_of(record: Record | None, fragment: int = 0) -> Head:
    if record is None:
        return Head(0, GENESIS[fragment], 0)
    return Head(record.version, record.digest, record.tokens_total)


NO_HEAD = Head(-1, "0" * 64, 0)


def make_heartbeat(sequence: int = 1, **changes: Any) -> Heartbeat:
    heartbeat = Heartbeat(
        run_id=RUN,
        protocol_version=PROTOCOL_VERSION,
        incarnation=1,
        sequence=sequence,
        name="someone",
        ready=True,
        uplink_mb_s=1.0,
        step_s=1.0,
        tokens_per_s=100.0,
        local_steps=(0, 0),
        heads=(head_of(None, 0), head_of(None, 1)),
        sightings=(),
    )
    return replace(heartbeat, **changes)


# -------------------------------------------------------------------- a node and its surroundings


def make_node(
    me: PeerId = A,
    *,
    chains: Sequence[Chain | None] = (),
    saved: dict[str, Any] | None = None,
    term_merges: int = 4,
    pacing: str = "fixed",
    pacing_tokens: int = 1,
    gossip: GossipPlan | None = None,
    blocks: bool = False,
    rolls_out: bool = False,
    mixes_below_quorum: bool = False,
    **times: Any,
) -> Node:
    config = NodeConfig(
        run_id=RUN,
        me=me,
        name=me,
        incarnation=1,
        genesis_digests=GENESIS,
        genesis_donors=(BOOT,),
        times=replace(TIMES, **times),
        term_merges=term_merges,
        pacing=pacing,
        pacing_tokens=pacing_tokens,
        gossip=gossip,
        blocks=blocks,
        rolls_out=rolls_out,
        mixes_below_quorum=mixes_below_quorum,
    )
    return Node(config, FakeSigner(me), random.Random(1), 0.0, chains, saved)


class Script:
    """Feeds a node events and sorts its actions; `now` moves on by hand."""

    def __init__(self, node: Node):
        self.node = node
        self.now = 0.0
        self.notes: list[str] = []

    def do(self, *happened: events.Event) -> list[actions.Action]:
        """All actions but notes and heartbeats, which most tests do not speak of."""
        return [a for a in self.everything(*happened) if not _is_routine(a)]

    def everything(self, *happened: events.Event) -> list[actions.Action]:
        done = [action for event in happened for action in self.node.handle(event, self.now)]
        self.notes += [a.text for a in done if isinstance(a, actions.Note)]
        return done

    def hear(self, peer: PeerId, message: Message) -> list[actions.Action]:
        return self.do(events.MessageArrived(peer, message))

    def wait(self, seconds: float) -> list[actions.Action]:
        """Wakes the node whenever it asks for it."""
        until = self.now + seconds
        done: list[actions.Action] = []
        while (deadline := self.node.deadline) is not None and deadline <= until:
            assert deadline > self.now or not done, "the node wakes without end"
            self.now = max(self.now, deadline)
            done += self.do(events.Woke())
        self.now = until
        return done

    def beat(self, *peers: PeerId, **changes: Any) -> list[actions.Action]:
        """A heartbeat of each."""
        sequence = int(self.now * 100) + 1
        return [a for p in peers for a in self.hear(p, make_heartbeat(sequence, **changes))]


def _is_routine(action: actions.Action) -> bool:
    note = isinstance(action, actions.Note)
    return note or (isinstance(action, actions.Send) and isinstance(action.message, Heartbeat))


def training(*peers: PeerId, version: int = 0, me: PeerId = A, **times: Any) -> Script:
    """A node whose learner stands on `version` of both fragments, among `peers` that stand there
    too.
    """
    records = [make_records(version, fragment=p) for p in (0, 1)]
    node = make_node(me, chains=[make_chain(records[p], p) for p in (0, 1)], **times)
    script = Script(node)
    script.do(events.PeersFound(peers), events.LearnerStarted())
    script.do(*(events.FragmentInstalled(p, version, 0) for p in (0, 1)))
    script.beat(*peers, heads=heads_at(records))
    return script


def heads_at(records: Sequence[Sequence[Record]]) -> tuple[Head, ...]:
    return tuple(head_of(r[-1] if r else None, p) for p, r in enumerate(records))


def opened(after: Record | None, synchronizer_attempt: int = 0, fragment: int = 0) -> RoundOpened:
    version = after.version + 1 if after else 1
    round_id = RoundId(fragment, version, (version - 1) // 4, synchronizer_attempt)
    return RoundOpened(round_id, after.digest if after else GENESIS[fragment])


def ready(round_id: RoundId, steps: int = 10, tokens: int = 1000) -> ContributionReady:
    return ContributionReady(round_id, steps, tokens, num_bytes=500, step_s=1.0)


def committed(peer: PeerId, record: Record) -> events.MessageArrived:
    return events.MessageArrived(peer, Committed(record))
