"""The node as synchronizer: for the fragments that are its turn it opens rounds, closes them,
and commits.

It holds no state of its own that another could not make anew: a round that dies with its
synchronizer is opened again by the next attempt, and contributors still have their tokens.
"""

from collections.abc import Sequence

from p2pdiloco.protocol import contributor, election, events, pacing
from p2pdiloco.protocol.actions import CommitRecord, DropRound, MergeRound, PullContribution
from p2pdiloco.protocol.lineage import CONTRIBUTORS_MAX, Contributor, Record, refusal
from p2pdiloco.protocol.membership import Member
from p2pdiloco.protocol.naming import PeerId, RoundId, sentence
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.round import GATHER_MIN_S, PULL_MIN_S, Pulled, Round, Stage
from p2pdiloco.protocol.state import NodeState, RoundOutcome
from p2pdiloco.protocol.wire import (
    Committed,
    ContributionReady,
    Heartbeat,
    RoundDeclined,
    RoundOpened,
)

IMPATIENT_MIN_S = 20.0
"""A fragment that is due for so long without a merge moves to the next attempt, although its
synchronizer lives.
"""
INVITED_FROM = 4
"""Of a large swarm, those are invited who spoke last, so many times more than there is room for:
they speak in random order, and what they said of their heads still holds.
"""


WITNESSES_MAX = 16
"""Members whose steps tell that a fragment is due for the patience with its synchronizer, which is
long enough for a rough median.
"""
REPEAT_S = 2.0
"""A member that has not answered a round for so long is asked again with each of its heartbeats."""
REOPEN_S = 1.0
"""From one round that failed to the next: where all decline at once, as learners do that have
nothing to contribute, or one is ready and hands out nothing, rounds would follow each other as fast
as messages travel.
"""
LATE_S = 3.0
"""A fragment that is due for so long, while nobody asks for our outer gradient, is waited for by
members who disagree about the attempt: the highest that anybody has seen counts.
"""


class Synchronizer:
    """Opens and drives this node's rounds. `explanation` says in a sentence why no round is being
    opened.
    """

    def __init__(self, node: NodeState):
        self.node = node
        self.last_launch = float("-inf")
        self.owned: list[Register] = []
        """Fragments whose next version is ours to make; see `look_for_posts`."""
        self.explanation = "not the synchronizer"

    # ---------------------------------------------------------------- when to open

    def look_for_posts(self) -> None:
        """Called when it may have become another's turn to make some fragment's next version."""
        self.owned = [r for r in self.node.registers if self.node.post(r)[0] == self.node.me]

    def look_around(self) -> None:
        """Called after every event: open what is due, close what has waited long enough."""
        node = self.node
        if not node.ready:
            self.explanation = "not taking part at the moment"
            for register in node.registers:
                self.give_up(register, "this node no longer takes part")
            return
        for register in node.registers:
            if register.round:
                self._look_at(register, register.round)
        self._open_what_is_due()

    def lose_patience(self) -> None:
        """Called with every heartbeat, not after every event, since it takes the steps of all
        learners in all fragments: a synchronizer that does not act is passed over.
        """
        node = self.node
        patience_s = max(IMPATIENT_MIN_S, 2 * node.config.times.inner_steps * node.swarm_step_s())
        ready = node.membership.ready(node.now, WITNESSES_MAX)
        for register in node.registers if node.ready else ():
            self._lose_patience(register, node.is_due(register, ready), patience_s)
        self.look_for_posts()

    def _lose_patience(self, register: Register, due: bool, patience_s: float) -> None:
        node = self.node
        if not due:
            register.due_since = None
            return
        if register.due_since is None:
            register.due_since = node.now
        if node.now - register.due_since >= patience_s:
            register.due_since = node.now
            self.pass_over(
                register, f"fragment {register.index} has been due for {patience_s:.0f} s"
            )
            self.give_up(register, "it took too long")

    def pass_over(self, register: Register, why: str) -> None:
        """The next version falls to the next attempt, and whose turn it is now is of no use for a
        while.
        """
        node = self.node
        silent, term, attempt = node.post(register)
        register.fence = max(register.fence, (term, attempt + 1))
        if silent and silent != node.me:
            node.idle.begin(silent, node.now)
        if silent:
            node.note(f"{why}; {silent[-8:]} is passed over in term {term}")

    def heartbeat(self, sender: PeerId, heartbeat: Heartbeat) -> None:
        for register in self.node.registers:
            if register.round:
                self._ask_again(register.round, sender)
        for register, attempt in zip(self.node.registers, heartbeat.attempts, strict=False):
            if heartbeat.heads[register.index].version == register.version:
                self._agree(register, attempt)

    def _ask_again(self, round_: Round, peer: PeerId) -> None:
        """It beats, so it may have an answer, or never have had the question."""
        silent = round_.stage is Stage.GATHERING and peer in round_.waiting_for
        if silent and self.node.now > round_.opened + REPEAT_S:
            self.node.send(peer, RoundOpened(round_.id, round_.parent))

    def _agree(self, register: Register, attempt: int) -> None:
        """Members that lost patience at different moments agree again on whose turn it is."""
        node, since = self.node, register.due_since
        late = since is not None and node.now > since + LATE_S
        if not late or register.offer or register.round:
            return
        seen = node.attempt(register)
        if seen < attempt <= seen + contributor.ATTEMPT_LEAP_MAX:
            term = election.term_of(register.version + 1, node.config.term_merges)
            register.fence, register.due_since = (term, attempt), node.now
            self.look_for_posts()

    def _open_what_is_due(self) -> None:
        node, times = self.node, self.node.config.times
        if not self.owned:
            self.explanation = "not the synchronizer"
            return
        open_rounds = sum(r.round is not None for r in node.registers)
        if open_rounds >= times.overlap_steps:
            self.explanation = f"{open_rounds} rounds are open, as many as tau allows"
            return
        floor_s = pacing.launch_floor_s(times, node.swarm_step_s(), len(self.owned))
        if node.now < self.last_launch + floor_s:
            self.explanation = f"launches are at least {floor_s:.2f} s apart"
            return
        free = [
            r
            for r in self.owned
            if not (r.round or r.pursuit or r.distrusted) and node.now >= r.reopen_at
        ]
        ready = node.membership.ready(node.now) if free else []
        due = [r for r in free if node.is_due(r, ready)]
        if not due:
            self.explanation = self._why_none(free, ready)
            return
        self._open(min(due, key=lambda r: (r.opened_at, r.version, r.index)))

    def _why_none(self, free: Sequence[Register], ready: Sequence[tuple[Member, Heartbeat]]) -> str:
        learners = [each for r in free for each in self.node.learners(r, ready)]
        asking = sum(asks for _, asks in learners)
        return f"learners ask for time, {asking} times" if asking else "no fragment is due yet"

    def _open(self, register: Register) -> None:
        node, chain = self.node, register.chain
        assert chain
        invited = self._invited(register)
        if len(invited) < node.config.times.quorum:
            self.explanation = (
                f"quorum {node.config.times.quorum} needed, {len(invited)} could contribute"
            )
            return
        _, term, attempt = node.post(register)
        round_id = RoundId(register.index, chain.version + 1, term, attempt)
        overlap_s = node.config.times.overlap_steps * node.swarm_step_s()
        register.round = Round(
            id=round_id,
            parent=chain.digest,
            invited=tuple(invited),
            quorum=node.config.times.quorum,
            opened=node.now,
            gather_deadline=node.now + max(GATHER_MIN_S, 4 * overlap_s),
        )
        self.last_launch = register.opened_at = node.now
        message = RoundOpened(round_id, chain.digest)
        for peer in invited:
            if peer != node.me:
                node.send(peer, message)
        if node.me in invited:
            report = contributor.round_opened(node, node.me, message)
            if report:
                self.report(node.me, report)

    def _invited(self, register: Register) -> Sequence[PeerId]:
        node, p = self.node, register.index
        others = [
            m.peer
            for m, h in node.membership.ready(node.now, INVITED_FROM * node.config.contributors_max)
            if h.heads[p].version == register.version
            and h.heads[p].digest == (register.chain.digest if register.chain else "")
            and node.cooled_down(m.peer)
        ]
        mine = [node.me] if node.learner_alive and register.installed is not None else []
        room = node.config.contributors_max - len(mine)
        if len(others) > room:
            others = node.rng.sample(others, room)
        return [*mine, *sorted(others)]

    # ---------------------------------------------------------------- gathering

    def report(self, peer: PeerId, report: ContributionReady) -> None:
        register = self.node.registers[report.round.fragment]
        round_ = register.round
        if not round_ or round_.id != report.round:
            self.node.refuse("a report for no open round")
            return
        if round_.report(peer, report, self.node.now):
            quorum_s = self.node.now - round_.opened
            self.node.clocks.quorum_s.add(quorum_s)
            round_.grace_until = self._grace_until(round_, quorum_s)

    def _grace_until(self, round_: Round, quorum_s: float) -> float:
        node = self.node
        if node.config.blocks:
            return round_.gather_deadline
        sync_s, step_s = node.clocks.sync_s.value, node.swarm_step_s()
        return node.now + pacing.grace_s(node.config.times, step_s, quorum_s, sync_s)

    def declined(self, peer: PeerId, message: RoundDeclined) -> None:
        register = self.node.registers[message.round.fragment]
        round_ = register.round
        if round_ and round_.id == message.round and peer in round_.invited:
            round_.decline(peer, message.reason)
            if message.attempt <= round_.id.attempt + contributor.ATTEMPT_LEAP_MAX:
                register.fence = max(register.fence, (round_.id.term, message.attempt))

    def _look_at(self, register: Register, round_: Round) -> None:
        if round_.stage is Stage.GATHERING:
            for peer in round_.waiting_for:
                if not self.node.is_alive(peer):
                    round_.decline(peer, "died or left while the round was open")
            admitted, round_.reason = round_.decide(self.node.now)
            if admitted is None:
                return
            if not admitted:
                self._fails(register, round_, round_.reason)
                return
            self._pull(round_, admitted)
        if round_.stage is Stage.PULLING:
            self._merge_when_pulled(register, round_)

    # ---------------------------------------------------------------- pulling, merging, committing

    def _pull(self, round_: Round, admitted: Sequence[PeerId]) -> None:
        usual_s = self.node.clocks.sync_s.value or 0.0
        round_.close(admitted, round_.reason, self.node.now, max(PULL_MIN_S, 8 * usual_s))
        for peer in admitted:
            self.node.do(PullContribution(round_.id, peer))

    def pulled(self, event: events.ContributionPulled) -> None:
        round_ = self.node.registers[event.round.fragment].round
        if round_ and round_.id == event.round:
            report = round_.reports.get(event.peer)
            if report and (report.tokens, report.steps) != (event.tokens, event.steps):
                reason = "other counters than it reported"
                self.node.refuse(reason, event.peer)
                round_.pull_failed(event.peer, reason)
            else:
                round_.pull_done(event.peer, Pulled(event.tokens, event.steps))

    def pull_failed(self, event: events.PullFailed) -> None:
        if event.hostile:
            self.node.refuse(event.reason, event.peer)
        round_ = self.node.registers[event.round.fragment].round
        if round_ and round_.id == event.round:
            round_.pull_failed(event.peer, sentence(event.reason))

    def _merge_when_pulled(self, register: Register, round_: Round) -> None:
        open_pulls = round_.pulls_open()
        if open_pulls and self.node.now < round_.pull_deadline:
            return
        for peer in open_pulls:
            round_.pull_failed(peer, "its outer gradient did not arrive in time")
        if len(round_.pulled) < max(1, round_.quorum):
            reason = f"{len(round_.pulled)} of {round_.quorum} needed were pulled"
            self._fails(register, round_, reason)
            return
        round_.stage = Stage.MERGING
        self.node.do(MergeRound(round_.id, self._parts(round_)))

    @staticmethod
    def _parts(round_: Round) -> tuple[Contributor, ...]:
        return tuple(
            Contributor(peer, got.tokens, got.steps) for peer, got in sorted(round_.pulled.items())
        )

    def merged(self, event: events.RoundMerged) -> None:
        node, register = self.node, self.node.registers[event.round.fragment]
        round_, chain = register.round, register.chain
        if not round_ or round_.id != event.round or round_.stage is not Stage.MERGING:
            return
        assert chain and chain.digest == round_.parent, "a round outlived its base"
        parts = self._parts(round_)
        refused = tuple(refusal(p, r) for p, r in sorted(round_.refused.items()))
        record = Record(
            run_id=node.config.run_id,
            fragment=register.index,
            version=round_.id.version,
            parent=chain.digest,
            payload_digest=event.payload_digest,
            payload_bytes=event.payload_bytes,
            state_digest=event.state_digest,
            contributors=parts,
            refused=refused[:CONTRIBUTORS_MAX],
            term=round_.id.term,
            attempt=round_.id.attempt,
            tokens_total=chain.tokens_total + sum(part.tokens for part in parts),
            reason=sentence(round_.reason),
            synchronizer=node.me,
        ).signed(node.signer)
        register.round = None
        node.clocks.sync_s.add(node.now - round_.closed)
        self._commit(register, record, node.now - round_.opened)

    def _commit(self, register: Register, record: Record, duration_s: float) -> None:
        node = self.node
        node.do(CommitRecord(record))
        remember(node, record, duration_s)
        node.note(line_of(record))
        for peer in node.membership.audience(node.now, node.rng):
            node.send(peer, Committed(record))
        assert register.chain
        register.chain.append(record)
        register.due_since = None

    def merge_failed(self, event: events.MergeFailed) -> None:
        register = self.node.registers[event.round.fragment]
        if register.round and register.round.id == event.round:
            self._fails(register, register.round, event.reason)

    def _fails(self, register: Register, round_: Round, reason: str) -> None:
        """By itself: the next would fare no better at once."""
        register.reopen_at = round_.opened + REOPEN_S
        self.give_up(register, reason)

    def give_up(self, register: Register, reason: str) -> None:
        round_ = register.round
        if not round_:
            return
        register.round = None
        self.node.do(DropRound(round_.id))
        self.node.rounds.append(
            RoundOutcome(
                round_.id.fragment,
                round_.id.version,
                *round_.id.fence,
                self.node.me,
                (),
                "given up",
                reason,
                self.node.now,
                self.node.now - round_.opened,
            )
        )
        self.node.note(f"{round_.id} is given up: {reason}")


def remember(node: NodeState, record: Record, duration_s: float | None) -> None:
    """Puts a committed round on the page."""
    contributors = tuple(c.peer for c in record.contributors)
    node.rounds.append(
        RoundOutcome(
            record.fragment,
            record.version,
            record.term,
            record.attempt,
            record.synchronizer,
            contributors,
            "merged",
            record.reason,
            node.now,
            duration_s,
        )
    )


def line_of(record: Record) -> str:
    """A merge in one line, for the log."""
    return (
        f"fragment {record.fragment} v{record.version}: {len(record.contributors)} merged by "
        f"{record.synchronizer[-8:]} (term {record.term}.{record.attempt}): {record.reason}"
    )
