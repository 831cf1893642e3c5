"""The node as replica: it learns of newer versions, asks for their records, and catches up.

One mechanism serves the next merge, a joiner, a sleeper, the losing side of a partition and a
replica that diverged. Per fragment at most one question and one catch-up are under way; a failure
waits before the next try.
"""

from collections.abc import Sequence

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import contributor, events
from p2pdiloco.protocol.actions import CatchUp, FetchRecords
from p2pdiloco.protocol.lineage import (
    RECORDS_KEPT,
    Chain,
    Record,
    Verdict,
    check_links,
    check_record,
)
from p2pdiloco.protocol.naming import PeerId, sentence
from p2pdiloco.protocol.pauses import backoff_s
from p2pdiloco.protocol.register import Pursuit, Register
from p2pdiloco.protocol.state import RETRY_MAX_S, RETRY_S, NodeState
from p2pdiloco.protocol.synchronizer import Synchronizer, line_of, remember
from p2pdiloco.protocol.transfer import adopted_chain, plan_catch_up
from p2pdiloco.protocol.wire import Committed, Heartbeat

PURSUITS_MAX = 4
"""Fragments that are caught up at once, and questions open at once: memory and downlink of a joiner
stay bounded.
"""
DONORS_MAX = 8
NEWS_S = 1.0
"""In a large swarm, a member that hears of the next version from a heartbeat asks for it when it
was not told within this."""
MAKER_NEWS_S = 8.0
"""The same, if the heartbeat is of the synchronizer: its uplink serves the first few, they the
others."""
ANSWER_S = 20.0
"""A question that is not answered for so long is forgotten: who announces much and answers slowly
must not keep us from asking others.
"""


class Follower:
    def __init__(self, node: NodeState, synchronizer: Synchronizer):
        self.node = node
        self.synchronizer = synchronizer

    # ---------------------------------------------------------------- learning of newer versions

    def committed(self, sender: PeerId, record: Record) -> None:
        """A record came in: the next one is followed at once, anything else heavier is looked
        into.
        """
        node, register = self.node, self.node.registers[record.fragment]
        if register.chain and register.chain.judge(record) is Verdict.KNOWN:
            return  # gossip brings each record several times: its signature is looked at once
        check_record(record, node.config.run_id, node.signer)
        if record.digest == register.disbelieved or not node.may_ask(sender):
            node.refuse("a record of a peer that was of no use")
            return
        if register.chain is None:
            self.ask(register, sender)
            return
        verdict = register.chain.judge(record)
        match verdict:
            case Verdict.KNOWN:
                return
            case Verdict.EXTENDS if not register.distrusted:
                self._extend(register, sender, record)
            case Verdict.LIGHTER:
                node.refuse("a record of an older version or a lighter lineage")
                node.tell_head(sender, register)
            case Verdict.AHEAD | Verdict.HEAVIER | Verdict.EXTENDS:
                self.ask(register, sender)

    def _extend(self, register: Register, sender: PeerId, record: Record) -> None:
        chain = register.chain
        assert chain
        if register.pursuit:
            return
        if record.tokens_total != chain.tokens_total + record.tokens:
            raise PeerError(f"tokens_total of {record.version} does not add up")
        self.synchronizer.give_up(register, f"{record.synchronizer[-8:]} committed it first")
        if register.busy or not self._is_full():
            self._pursue(register, None, (record,), sender)

    def _forward(self, record: Record, source: PeerId) -> None:
        """In a swarm too large for the synchronizer to tell everybody, news spreads by gossip; and
        since it comes from those that have the payload by then, so does the payload.
        """
        node = self.node
        if self._is_small():
            return
        for peer in node.membership.audience(node.now, node.rng):
            if peer not in (source, record.synchronizer):
                node.send(peer, Committed(record))

    def _is_small(self) -> bool:
        """Whether a synchronizer tells everybody, and serves its merge to everybody."""
        return self.node.membership.tells_all(self.node.now)

    def heartbeat(self, sender: PeerId, heartbeat: Heartbeat) -> None:
        for register, head in zip(self.node.registers, heartbeat.heads, strict=True):
            if not register.gains_from_head(head):
                continue
            register.newest_seen = max(register.newest_seen, head.version)
            if not self._will_be_told(register, sender, head.version):
                self.ask(register, sender)

    def _will_be_told(self, register: Register, sender: PeerId, version: int) -> bool:
        """Whether to wait for the next record rather than to ask for it: if everybody asked as soon
        as a heartbeat boasts of it, the synchronizer would serve everybody.
        """
        node = self.node
        if version != register.version + 1 or self._is_small():
            return False
        if register.news_of != version:
            register.news_of, register.news_at = version, node.now
        is_its_maker = sender == node.post(register)[0]
        return node.now < register.news_at + (MAKER_NEWS_S if is_its_maker else NEWS_S)

    def look_around(self) -> None:
        """Now and then: forget questions without answer, and look who has something newer."""
        node = self.node
        for register in node.registers:
            if register.asked and node.now > register.asked_at + ANSWER_S:
                self.of_no_use(register, register.asked, "no answer to a question for records")
            if register.newest_seen != register.version:
                newer = (head.version for head in node.better_heads(register))
                register.newest_seen = max(newer, default=register.version)
            if register.distrusted:
                self.ask(register, node.me)

    # ---------------------------------------------------------------- asking and planning

    def ask(self, register: Register, peer: PeerId) -> None:
        node = self.node
        if register.busy or self._is_full() or node.now < register.retry_at or node.gone:
            return
        if not node.may_ask(peer):
            return
        depth = RECORDS_KEPT if register.distrusted else 0
        self._fetch(register, peer, max(0, register.version - depth))

    def _is_full(self) -> bool:
        """Nothing more is begun now; heartbeats will remind us of what is passed by."""
        return sum(r.busy for r in self.node.registers) >= PURSUITS_MAX

    def _fetch(self, register: Register, peer: PeerId, after: int) -> None:
        register.asked, register.asked_after, register.asked_at = peer, after, self.node.now
        self.node.do(FetchRecords(peer, register.index, after))

    def records_fetched(self, event: events.RecordsFetched) -> None:
        node, register = self.node, self.node.registers[event.fragment]
        if register.asked != event.peer:
            return
        register.asked = None
        if register.pursuit:
            return
        try:
            check_links(
                event.records,
                register.index,
                lambda record: check_record(record, node.config.run_id, node.signer),
            )
        except PeerError as error:
            node.refuse(str(error), event.peer)
            return
        try:
            if self._forked(register, event.records):
                deeper = max(0, register.version - RECORDS_KEPT)
                self._fetch(register, event.peer, deeper)
                return
            plan = plan_catch_up(
                register.chain,
                event.records,
                event.snapshots,
                node.config.genesis_digests[register.index],
                register.index,
                replay=register.failures == 0,
                distrusted=register.distrusted,
                begun=event.begun,
            )
        except PeerError as error:
            self.of_no_use(register, event.peer, str(error))
            return
        if plan is None:
            self._disappointed(register, event.peer)
        elif any(record.digest == register.disbelieved for record in plan[1]):
            self.of_no_use(register, event.peer, "its lineage has a record that is wrong")
        else:
            self._pursue(register, plan[0], plan[1], event.peer, event.records)

    @staticmethod
    def _forked(register: Register, records: Sequence[Record]) -> bool:
        """Whether older records are needed to see where the donor's lineage leaves ours."""
        chain = register.chain
        if not chain or register.asked_after <= chain.base:
            return False
        return chain.common_version(records) is None

    def _disappointed(self, register: Register, peer: PeerId) -> None:
        """It had nothing newer. Either we have caught up meanwhile, or it announces what it does
        not have.
        """
        member = self.node.membership.members.get(peer)
        announced = member.heartbeat.heads[register.index] if member and member.heartbeat else None
        if announced and register.gains_from(announced.weight):
            self.of_no_use(register, peer, "it does not have the records that it announced")

    def records_failed(self, event: events.RecordsFailed) -> None:
        register = self.node.registers[event.fragment]
        if register.asked == event.peer:
            self.of_no_use(register, event.peer, f"no records: {event.reason}")

    def _pursue(
        self,
        register: Register,
        snapshot: events.SnapshotInfo | None,
        records: tuple[Record, ...],
        source: PeerId,
        lineage: tuple[Record, ...] | None = None,
    ) -> None:
        lineage = records if lineage is None else lineage
        target = lineage[-1] if lineage else None
        vouching = [r for r in lineage if snapshot and r.version <= snapshot.version]
        catch_up = CatchUp(
            fragment=register.index,
            snapshot=snapshot,
            vouching=tuple(vouching),
            records=records,
            donors=self._donors(register, source, target),
        )
        register.pursuit = Pursuit(catch_up, lineage, source)
        self.synchronizer.give_up(register, "a newer version is being fetched")
        self.node.do(catch_up)

    def _donors(
        self, register: Register, source: PeerId, target: Record | None
    ) -> tuple[PeerId, ...]:
        """Who should have the bytes, best first: the one who told us, then all that stand there, in
        any order, so that they share the work. The synchronizer, which everybody knows to have
        them, is spared in a large swarm.
        """
        node, p = self.node, register.index
        version = target.version if target else 0
        holders = [
            m.peer
            for m, h in node.membership.ready(node.now)
            if h.heads[p].version >= version and node.may_ask(m.peer)
        ]
        holders = node.rng.sample(holders, len(holders))
        maker = [target.synchronizer] if target else []
        ranked = [*maker, *holders] if self._is_small() else [*holders[: DONORS_MAX - 2], *maker]
        donors = dict.fromkeys([source, *ranked, *node.config.genesis_donors])
        return tuple(d for d in donors if d != node.me)[:DONORS_MAX]

    # ---------------------------------------------------------------- when our own state is wrong

    def state_damaged(self, event: events.StateDamaged) -> None:
        """Nothing is built upon it any more. Our own disk has what we need, and so have others."""
        node, register = self.node, self.node.registers[event.fragment]
        if register.distrusted or register.version != event.version:
            return
        register.damaged += 1
        node.note(
            f"fragment {register.index} v{register.version} was damaged in memory and is being "
            f"replaced"
        )
        self._distrust(register)
        self.ask(register, node.me)

    def _distrust(self, register: Register) -> None:
        """The learner may train on the same wrong values: it will receive the right ones."""
        register.distrusted, register.handed = True, None
        self.synchronizer.give_up(register, "this node's own state is being replaced")

    # ---------------------------------------------------------------- getting there

    def state_reached(self, event: events.StateReached) -> None:
        node, register = self.node, self.node.registers[event.fragment]
        pursuit = register.pursuit
        assert pursuit, f"fragment {event.fragment} was not being caught up"
        if event.record is None:
            self._adopt(register, pursuit, event.version)
        else:
            assert register.chain
            register.chain.append(event.record)
            node.merges += 1
            contributor.version_reached(node, register)
            remember(node, event.record, None)
            node.idle.forgive(event.record.synchronizer)
            if pursuit.is_news:
                self._forward(event.record, pursuit.source)
        register.failures = 0
        if event.version == pursuit.target:
            register.pursuit = None
            node.note(_arrival(register, pursuit))
            node.unhelpful.forgive(pursuit.source)
            register.due_since = None
            contributor.hand_over(node, register)

    def _adopt(self, register: Register, pursuit: Pursuit, version: int) -> None:
        """A snapshot was loaded: the chain is now that of the donor up to there."""
        node, before = self.node, register.chain
        genesis = node.config.genesis_digests[register.index]
        register.chain = adopted_chain(before, pursuit.lineage, version, genesis)
        if register.distrusted:
            register.distrusted, register.mended_at = False, node.now
        if before and pursuit.lineage:
            first = _first_lost(before, pursuit.lineage)
            if first <= before.version:
                register.fence = (0, 0)  # of a lineage that is followed no more
                contributor.branch_lost(node, register, first, before.version)
        contributor.lineage_changed(node, register)
        contributor.version_reached(node, register)

    def catch_up_failed(self, event: events.CatchUpFailed) -> None:
        node, register = self.node, self.node.registers[event.fragment]
        pursuit, register.pursuit = register.pursuit, None
        assert pursuit, f"fragment {event.fragment} was not being caught up"
        if event.diverged:
            self._diverged(register, pursuit)
        self._failed(register, pursuit.source, event.reason)
        if register.chain:
            contributor.hand_over(node, register)

    def _diverged(self, register: Register, pursuit: Pursuit) -> None:
        """A merge led to another state here than its record says. At first our own state is at
        fault; if one that others vouch for leads elsewhere too, the record is.
        """
        node, version = self.node, register.version + 1
        record = next(r for r in pursuit.catch_up.records if r.version == version)
        if record.digest == register.doubted and not register.distrusted:
            register.disbelieved = record.digest
            node.refuse("a record of a state that its merge does not lead to", record.synchronizer)
        else:
            register.doubted = record.digest
            node.refuse("this node's own state had diverged")
            self._distrust(register)

    def _failed(self, register: Register, source: PeerId, reason: str) -> None:
        register.failures += 1
        pause_s = backoff_s(RETRY_S, register.failures, RETRY_MAX_S)
        register.retry_at = self.node.now + pause_s
        self.node.unhelpful.begin(source, self.node.now)
        self.node.note(
            f"fragment {register.index}: {sentence(reason)}; next try in {pause_s:.1f} s"
        )

    def of_no_use(self, register: Register, peer: PeerId, reason: str) -> None:
        """Others may be asked at once."""
        register.asked = None
        pause_s = self.node.unhelpful.begin(peer, self.node.now)
        self.node.note(
            f"fragment {register.index}: {sentence(reason)}; {peer[-8:]} is not asked again for "
            f"{pause_s:.1f} s"
        )


def _first_lost(chain: Chain, lineage: Sequence[Record]) -> int:
    """The first version of `chain` that is not on `lineage`. What is older than the first record
    shown cannot be compared: it stays as it is.
    """
    common = chain.common_version(lineage)
    return max(chain.base + 1, lineage[0].version if common is None else common + 1)


def _arrival(register: Register, pursuit: Pursuit) -> str:
    """How a pursuit ended, in one line for the log."""
    records, snapshot = pursuit.catch_up.records, pursuit.catch_up.snapshot
    if snapshot is None and len(records) == 1:
        return line_of(records[0])
    start = f"a snapshot of v{snapshot.version} and " if snapshot else ""
    return f"fragment {register.index} v{register.version}: reached by {start}{len(records)} merges"
