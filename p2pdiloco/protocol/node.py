"""The node: one state machine from events to actions.

    actions = node.handle(event, now)      # and again at node.deadline, with Woke

`now` is a monotonic time in seconds. What a node does as contributor, as synchronizer and as
replica is in `contributor.py`, `synchronizer.py` and `follower.py`, over the state they share
(`state.py`); this file hands events to them and keeps heartbeats going. Nothing here waits: every
wait is a deadline or an event still to come.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, assert_never

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import contributor, events
from p2pdiloco.protocol.actions import Action
from p2pdiloco.protocol.fallback import Fallback
from p2pdiloco.protocol.follower import Follower
from p2pdiloco.protocol.gossip import Gossiper
from p2pdiloco.protocol.ledger import Ledger
from p2pdiloco.protocol.lineage import Chain, Record, Signer
from p2pdiloco.protocol.membership import REPORTERS_MAX, Membership
from p2pdiloco.protocol.naming import PeerId, sentence
from p2pdiloco.protocol.pacer import Pacer, policy_called
from p2pdiloco.protocol.policies import Moment
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.state import Condition, NodeConfig, NodeState
from p2pdiloco.protocol.synchronizer import Synchronizer
from p2pdiloco.protocol.wire import (
    NAME_CHARS_MAX,
    PROTOCOL_VERSION,
    Committed,
    ContributionReady,
    Head,
    Heartbeat,
    Left,
    Message,
    Mixing,
    RoundDeclined,
    RoundOpened,
)

EVENTS_KEPT = 200
"""The newest events, for replay in a test; each may hold a message of up to 64 KiB."""
JOIN_PATIENCE_S = 5.0
"""A node without state that was told of members waits so long for their heartbeats before it takes
the genesis weights.
"""
FAREWELLS_MAX = 64
"""Who leaves does not open a connection to everybody in a large swarm."""
LOSS_SMOOTHING = 0.1
"""Of the loss by which progress since a sync is judged: single batches differ by more."""
NO_HEAD = Head(-1, "0" * 64, 0)
UNSAVED = "in a round that was not on this node's disk when it ended"
STOPPED = "the node was stopped before they were merged"


class Node:
    """`chains` and `saved` are what an earlier life of this node left on disk, if anything."""

    def __init__(
        self,
        config: NodeConfig,
        signer: Signer,
        rng: random.Random,
        now: float,
        chains: Sequence[Chain | None] = (),
        saved: Mapping[str, Any] | None = None,
    ):
        num = len(config.genesis_digests)
        held = list(chains) or [None] * num
        registers = [Register(p, chain) for p, chain in enumerate(held)]
        self.state = NodeState(
            config,
            signer,
            rng,
            now,
            registers,
            Membership(config.me),
            Ledger(num),
            Pacer(policy_called(config.pacing, rng, config.pacing_tokens)),
        )
        self.synchronizer = Synchronizer(self.state)
        self.follower = Follower(self.state, self.synchronizer)
        plan = config.gossip
        self.gossiper = Gossiper(self.state, self.follower, plan) if plan else None
        self.fallback = Fallback(self.state) if config.mixes_below_quorum else None
        self.history: deque[tuple[float, events.Event]] = deque(maxlen=EVENTS_KEPT)
        self._heads = [NO_HEAD] * num
        self._sequence = 0
        self._next_heartbeat = now
        self._genesis_at: float | None = None
        if saved:
            self._resume_ledger(saved)

    # ---------------------------------------------------------------- the one entry

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Takes in one event; returns what is to be done, in order."""
        state = self.state
        assert now >= state.now, f"time went back by {state.now - now} s"
        state.now = now
        self.history.append((now, event))
        if not state.gone:
            beats = now >= self._next_heartbeat
            renewed = state.renew(beats)
            self._dispatch(event)
            renewed |= state.renew(beats)
            self._look_around(renewed or beats or not _is_quiet(event))
        actions, state.out = state.out, []
        return actions

    @property
    def deadline(self) -> float | None:
        """When to call `handle` with Woke if nothing happens before; None after leaving."""
        if self.state.gone:
            return None
        rounds = [r.round.deadline for r in self.state.registers if r.round]
        if self.gossiper:
            rounds.append(self.gossiper.deadline)
        return min([self._next_heartbeat, *(d for d in rounds if d is not None)])

    @property
    def condition(self) -> Condition:
        state = self.state
        if state.gone:
            return Condition.LEFT
        if not all(r.chain for r in state.registers):
            return Condition.FETCHING
        if state.settling:
            return Condition.SETTLED
        alone = not state.membership.ready(state.now)
        return Condition.ISOLATED if alone else Condition.TRAINING

    @property
    def is_settled(self) -> bool:
        """Settling was asked for, no newer version is known of or on its way, and the learner, if
        it lives, has received what we hold: so the ledger is final as well.
        """
        state = self.state
        ending = self.gossiper is not None and self.gossiper.is_busy
        return (
            state.settling
            and not ending
            and all(
                not r.busy
                and not state.better_heads(r)
                and (r.installed == r.version or not state.learner_alive)
                for r in state.registers
            )
        )

    def save(self) -> dict[str, Any]:
        """What a later life needs to keep the ledger exact, as plain data."""
        installed = [r.installed for r in self.state.registers]
        return {"ledger": self.state.ledger.save(), "installed": installed}

    def records_after(self, fragment: int, version: int) -> tuple[Record, ...]:
        """What a donor answers to FetchRecords, ascending."""
        chain = self.state.registers[fragment].chain
        return tuple(r for r in chain.records if r.version > version) if chain else ()

    def _resume_ledger(self, saved: Mapping[str, Any]) -> None:
        ledger = self.state.ledger = Ledger.load(saved["ledger"])
        for register, installed in zip(self.state.registers, saved["installed"], strict=True):
            p = register.index
            if installed is not None:
                ledger.settle(p, installed + 1, merged=0, offered=0, kind="lost", reason=STOPPED)
            for record in register.chain.records if register.chain else ():
                ledger.revise(p, record.version, record.tokens_of(self.state.me))
            if self.gossiper:
                ledger.lose_after(p, register.version, UNSAVED)

    # ---------------------------------------------------------------- events

    def _dispatch(self, event: events.Event) -> None:  # noqa: C901 (one case for each event)
        state, synchronizer, follower = self.state, self.synchronizer, self.follower
        match event:
            case events.Woke():
                pass
            case events.MessageArrived(sender, message):
                self._message(sender, message)
            case events.PeersFound(peers):
                self._peers_found(peers)
            case events.StepsDone():
                self._steps_done(event)
            case events.MachineMeasured(pressure, served):
                state.pacer.measured(pressure, served)
                self._pace()
            case events.LearnerStarted():
                contributor.learner_started(state)
            case events.LearnerStopped(reason):
                contributor.learner_stopped(state, reason)
                if self.fallback:
                    self.fallback.learner_stopped()
                if self.gossiper:
                    self.gossiper.learner_stopped()
            case events.FragmentInstalled():
                if self.gossiper:
                    self.gossiper.installed(event)
                else:
                    contributor.installed(state, event)
                if self.fallback:
                    self.fallback.installed(event.fragment)
            case events.ContributionPrepared():
                self._contribution_prepared(event)
            case events.ContributionFailed():
                contributor.failed(state, event)
            case events.ContributionPulled():
                synchronizer.pulled(event)
            case events.PullFailed():
                synchronizer.pull_failed(event)
            case events.RoundMerged():
                self._round_merged(event)
            case events.MergeFailed():
                synchronizer.merge_failed(event)
            case events.RecordsFetched():
                (self.gossiper or follower).records_fetched(event)
            case events.RecordsFailed():
                follower.records_failed(event)
            case events.StateReached():
                (self.gossiper or follower).state_reached(event)
            case events.CatchUpFailed():
                follower.catch_up_failed(event)
            case events.StateDamaged():
                follower.state_damaged(event)
            case events.WrongBytes(peer, reason):
                state.refuse(reason, peer)
            case events.DispatcherIdle(reason):
                synchronizer.pass_over(state.registers[0], reason)
            case (
                events.MixFetched()
                | events.MixFailed()
                | events.RoundCut()
                | events.RoundFinished()
                | events.RoundUnfinished()
                | events.ValuesTaken()
                | events.ValuesBlended()
                | events.ValuesLost()
            ):
                mixes = self.gossiper or self.fallback
                assert mixes, event
                mixes.handle(event)
            case events.SettleAsked():
                state.settling = True
                self._heartbeat()
            case events.LeaveAsked():
                self._leave()
            case _:
                assert_never(event)

    def _message(self, sender: PeerId, message: Message) -> None:
        """A message that breaks the protocol is refused and counted; it never raises."""
        if sender == self.state.me:
            return
        try:
            self._take(sender, message)
        except PeerError as error:
            self.state.refuse(str(error), sender)

    def _take(self, sender: PeerId, message: Message) -> None:  # noqa: C901 (one case for each)
        num = len(self.state.registers)
        match message:
            case Heartbeat():
                self._take_heartbeat(sender, message)
            case Left():
                self.state.membership.left(sender)
            case Mixing():
                mixes = self.gossiper or self.fallback
                if not mixes:
                    raise PeerError("it gossips, this run has synchronizers")
                mixes.mixing(sender, message)
            case _ if self.gossiper:
                raise PeerError(f"it speaks of a {message.kind}, this run gossips")
            case Committed(record):
                _check_fragment(record.fragment, num)
                self.follower.committed(sender, record)
            case RoundOpened():
                _check_fragment(message.round.fragment, num)
                report = contributor.round_opened(self.state, sender, message)
                if report:
                    self.state.send(sender, report)
            case ContributionReady():
                _check_fragment(message.round.fragment, num)
                self.synchronizer.report(sender, message)
            case RoundDeclined():
                _check_fragment(message.round.fragment, num)
                self.synchronizer.declined(sender, message)
            case _:
                assert_never(message)

    def _take_heartbeat(self, sender: PeerId, heartbeat: Heartbeat) -> None:
        num = len(self.state.registers)
        if heartbeat.run_id != self.state.config.run_id:
            raise PeerError("it takes part in another run")
        if heartbeat.protocol_version != PROTOCOL_VERSION:
            raise PeerError(
                f"it speaks protocol {heartbeat.protocol_version}, this node {PROTOCOL_VERSION}; "
                f"update the older one"
            )
        if len(heartbeat.heads) != num or len(heartbeat.local_steps) != num:
            raise PeerError(f"a heartbeat of {len(heartbeat.heads)} fragments, the run has {num}")
        if self.gossiper and any(head.tokens_total for head in heartbeat.heads):
            raise PeerError("it claims merges, this run gossips")
        newcomer = self._is_newcomer(sender, heartbeat)
        if self.state.membership.heard(sender, heartbeat, self.state.now):
            if newcomer and self.state.ready:
                self.state.send(sender, self._my_heartbeat())
            if self.gossiper:
                self.gossiper.heartbeat(sender, heartbeat)
            else:
                self.follower.heartbeat(sender, heartbeat)
                self.synchronizer.heartbeat(sender, heartbeat)

    def _is_newcomer(self, sender: PeerId, heartbeat: Heartbeat) -> bool:
        """Whether we hear for the first time, and from itself, of a node that holds no state. It is
        answered at once: in a large swarm it could wait long for the heartbeat of anybody, and
        would take the genesis weights meanwhile.
        """
        member = self.state.membership.members.get(sender)
        known = member.heartbeat if member else None
        empty = any(head.version < 0 for head in heartbeat.heads)
        return empty and (known is None or known.incarnation < heartbeat.incarnation)

    def _peers_found(self, peers: Sequence[PeerId]) -> None:
        new = [p for p in peers if p != self.state.me]
        membership = self.state.membership
        for peer in new:
            if peer not in membership.members:
                membership.meet(peer, self.state.now)
        if self._genesis_at is None:
            self._genesis_at = self.state.now + (JOIN_PATIENCE_S if new else 0.0)
            self._heartbeat()

    def _steps_done(self, event: events.StepsDone) -> None:
        state = self.state
        before = [r.steps for r in state.registers]
        contributor.steps_done(state, event)
        state.step_s = event.step_s
        state.tokens_per_s = event.tokens / (event.steps * event.step_s) if event.step_s else 0.0
        if event.loss is not None and isfinite(event.loss):
            before_loss = event.loss if state.loss is None else state.loss
            state.loss = before_loss + LOSS_SMOOTHING * (event.loss - before_loss)
        for register, steps in zip(state.registers, before, strict=True):
            if steps < state.window(register).opens <= register.steps:
                self._tell_due(register)
        self._pace()

    def _pace(self) -> None:
        """Whether a sync would disturb what shares this machine; the synchronizer should not learn
        a second late that it no longer does.
        """
        state = self.state
        for register in state.registers if state.config.times.slack_steps else ():
            asked, register.asks_for_time = register.asks_for_time, self._asks_for_time(register)
            if asked and not register.asks_for_time:
                self._tell_due(register)

    def _asks_for_time(self, register: Register) -> bool:
        state, (opens, closes) = self.state, self.state.window(register)
        if register.installed is None or register.installed != register.version:
            return False
        moment = Moment(
            fragment=register.index,
            version=register.version + 1,
            steps=register.steps,
            tokens=state.ledger.pending[register.index],
            opens=opens,
            closes=closes,
            step_s=state.step_s,
            staleness_s=state.now - register.installed_at,
            loss_fall=max(0.0, (register.loss_then or 0.0) - (state.loss or 0.0)),
            pressure=state.pacer.pressure,
            forecast=state.pacer.forecast,
        )
        return not state.pacer.decide(moment).sync and register.steps >= opens

    def _tell_due(self, register: Register) -> None:
        """The synchronizer should not learn a second late that we have done H steps."""
        if self.gossiper:
            self._heartbeat()
            return
        synchronizer = self.state.post(register)[0]
        if synchronizer and synchronizer != self.state.me and self._reports():
            self.state.send(synchronizer, self._without_gossip(self._my_heartbeat()))

    def _contribution_prepared(self, event: events.ContributionPrepared) -> None:
        report = contributor.prepared(self.state, event)
        if not report:
            return
        offer = self.state.registers[event.round.fragment].offer
        assert offer
        if offer.synchronizer == self.state.me:
            self.synchronizer.report(self.state.me, report)
        else:
            self.state.send(offer.synchronizer, report)

    def _round_merged(self, event: events.RoundMerged) -> None:
        register = self.state.registers[event.round.fragment]
        before = register.version
        self.synchronizer.merged(event)
        if register.version > before:
            self.state.merges += 1
            contributor.version_reached(self.state, register)
            contributor.hand_over(self.state, register)

    def _leave(self) -> None:
        state = self.state
        for register in state.registers:
            self.synchronizer.give_up(register, "this node leaves")
        for peer in self._farewell():
            state.send(peer, Left())
        state.gone = True

    def _farewell(self) -> list[PeerId]:
        """Whom to tell that we leave: everybody, in a large swarm those who would wait for us, then
        some; the others notice that nobody names us any more.
        """
        state = self.state
        alive = [m.peer for m in state.membership.alive(state.now)]
        if len(alive) <= FAREWELLS_MAX:
            return alive
        waiting = [r.offer.synchronizer for r in state.registers if r.offer]
        told = dict.fromkeys([*waiting, *self._deputies(), *state.rng.sample(alive, FAREWELLS_MAX)])
        return [p for p in told if p != state.me][:FAREWELLS_MAX]

    # ---------------------------------------------------------------- time

    def _look_around(self, moved: bool) -> None:
        """`moved`: it may have become another's turn to synchronize something."""
        state = self.state
        if state.gone:
            return
        beats = state.now >= self._next_heartbeat
        if self.gossiper:
            self._look_around_for_partners(self.gossiper, beats)
            return
        if beats:
            state.review_posts()
        if moved:
            self.synchronizer.look_for_posts()
        if beats:
            self._heartbeat()
            state.membership.forget(state.now)
            self.follower.look_around()
            self._start_from_genesis()
            self.synchronizer.lose_patience()
            if self.fallback:
                self.fallback.beat()
        self.synchronizer.look_around()

    def _look_around_for_partners(self, gossiper: Gossiper, beats: bool) -> None:
        if beats:
            self._heartbeat()
            self.state.membership.forget(self.state.now)
            self.follower.look_around()
            self._start_from_genesis()
            gossiper.beat()
        gossiper.look_around(beats)

    def _start_from_genesis(self) -> None:
        """Nobody who is here has anything newer: take version 0 from those who made it."""
        state = self.state
        if self._genesis_at is None or state.now < self._genesis_at:
            return
        for register in state.registers:
            if register.chain is None and not state.better_heads(register):
                for donor in state.config.genesis_donors:
                    self.follower.ask(register, donor)

    def _heartbeat(self) -> None:
        state, membership = self.state, self.state.membership
        self._next_heartbeat = state.now + membership.heartbeat_s
        message = self._my_heartbeat()
        audience = membership.audience(state.now, state.rng)
        for peer in audience:
            state.send(peer, message)
        report = self._without_gossip(message)
        for peer in dict.fromkeys([*self._posts(), *self._deputies()]):
            if peer not in audience:
                state.send(peer, report)

    def _without_gossip(self, message: Heartbeat) -> Heartbeat:
        """For those who want to hear of this node alone, in a swarm where gossip is most of a
        heartbeat.
        """
        return replace(message, sightings=()) if self.state.membership.slowness > 1 else message

    def _posts(self) -> list[PeerId]:
        """The synchronizers of the next rounds: they need our counters, if we are asked; where
        there are none, those we mix with.
        """
        if self.gossiper:
            return self.gossiper.partners
        posts = {self.state.post(r)[0] for r in self.state.registers if r.chain}
        return [p for p in sorted(filter(None, posts)) if p != self.state.me and self._reports()]

    def _reports(self) -> bool:
        """Whether a synchronizer is told of our counters this time. Up to `REPORTERS_MAX` members
        all report; beyond that as many as these in each period, drawn anew: a median needs no more.
        """
        share = REPORTERS_MAX / max(1, len(self.state.membership.members))
        return share >= 1 or self.state.rng.random() < share

    def _deputies(self) -> list[PeerId]:
        state = self.state
        return [p for r in self.synchronizer.owned for p in state.deputies(r) if p != state.me]

    def _my_heartbeat(self) -> Heartbeat:
        state = self.state
        self._sequence += 1
        return Heartbeat(
            run_id=state.config.run_id,
            protocol_version=PROTOCOL_VERSION,
            incarnation=state.config.incarnation,
            sequence=self._sequence,
            name=sentence(state.config.name)[:NAME_CHARS_MAX],
            ready=state.ready,
            uplink_mb_s=state.uplink_mb_s,
            step_s=state.step_s,
            tokens_per_s=state.tokens_per_s,
            local_steps=tuple(state.local_steps(r) for r in state.registers),
            heads=tuple(map(self._head, state.registers)),
            sightings=state.membership.sightings(state.now, state.rng),
            attempts=tuple(state.attempt(r) for r in state.registers),
            asks_for_time=tuple(r.index for r in state.registers if r.asks_for_time),
        )

    def _head(self, register: Register) -> Head:
        """The same object as long as it is the same head: everybody keeps everybody's last word."""
        kept, chain = self._heads[register.index], register.chain
        if chain and (kept.version, kept.digest) != (chain.version, chain.digest):
            kept = Head(chain.version, chain.digest, chain.tokens_total)
            self._heads[register.index] = kept
        return kept


def _is_quiet(event: events.Event) -> bool:
    """Events that move neither a version nor a fence (a heartbeat that does, says so). They are by
    far the most; who fell silent or came back meanwhile is noticed with our next heartbeat.
    """
    match event:
        case events.MessageArrived(_, Heartbeat()):
            return True
        case events.Woke() | events.StepsDone() | events.FragmentInstalled():
            return True
        case events.MachineMeasured():
            return True
        case _:
            return False


def _check_fragment(fragment: int, num_fragments: int) -> None:
    if fragment >= num_fragments:
        raise PeerError(f"fragment {fragment}; the run has {num_fragments}")
