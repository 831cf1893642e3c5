"""Machines in virtual time: a heap of (time, serial, machine, event), one seeded Random, and every
action of the protocol carried out with plausible delays.

The nodes are the production ones. Nothing here decides anything for them; what goes wrong is in
`faults.py`, what must hold in `checkers.py`. `history` is a digest of all that happened: the same
seed gives the same one.
"""

import hashlib
import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.state import NodeConfig
from p2pdiloco.protocol.wire import Message
from p2pdiloco.simulation.checkers import Checkers, PromiseBroken
from p2pdiloco.simulation.machine import (
    Contribution,
    Disk,
    FragmentLog,
    KeyedSigner,
    LearnerModel,
    Machine,
    State,
    digest,
    genesis_digest,
)
from p2pdiloco.simulation.network import HOME, Network, Quality

RUN_ID = "simulation"
GENESIS_DONOR = PeerId("genesis-donor")
LEARNER_START_S = 0.5
LEARNER_RESTART_S = 1.0
HANDOVER_S = 0.02
ENCODE_S = 0.05
MERGE_S = 0.05
APPLY_S = 0.02
PERSIST_S = 2.0
DISCOVERY_S = 15.0
STALL_S = 1.0
"""A stream to a peer that does not answer is given up after this."""
ANNOUNCED_S = 60.0
"""Discovery still names a machine for so long after it went down."""
CHUNKS = 10
"""Pieces in which a snapshot or a payload travels; each can come from another donor."""
CHUNK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """The machines and the run spec."""

    num_machines: int
    num_fragments: int = 3
    inner_steps: int = 8
    overlap_steps: int = 2
    quorum: int = 1
    grace_factor: float = 0.8
    term_merges: int = 4
    step_s: float = 0.6
    step_spread: float = 0.3
    """Step times are drawn from `step_s * (1 +- step_spread)`; each step varies by a tenth."""
    network: Quality = HOME

    @property
    def times(self) -> SyncTimes:
        return SyncTimes(
            inner_steps=self.inner_steps,
            num_fragments=self.num_fragments,
            overlap_steps=self.overlap_steps,
            quorum=self.quorum,
            grace_factor=self.grace_factor,
        )


@dataclass(slots=True)
class _Transfer:
    """A CatchUp under way: items are fetched in chunks, each from the first donor that gives it."""

    catch_up: actions.CatchUp
    item: int = 0
    chunk: int = 0
    donor: int = 0

    @property
    def num_items(self) -> int:
        return len(self.catch_up.records) + (self.catch_up.snapshot is not None)

    def record(self) -> Record | None:
        """What the current item is: a merge, or None for the snapshot."""
        index = self.item - (self.catch_up.snapshot is not None)
        return self.catch_up.records[index] if index >= 0 else None


class World:
    """`trace` is told every note, fault and commit, as (virtual time, who, text)."""

    def __init__(
        self,
        seed: int,
        swarm: Swarm,
        trace: Callable[[float, str, str], None] | None = None,
    ):
        self.seed = seed
        self.swarm = swarm
        self.rng = random.Random(seed)
        self.now = 0.0
        self.trace = trace
        self.network = Network(self.rng, swarm.network)
        self.machines = {m.name: m for m in map(self._new_machine, range(swarm.num_machines))}
        self.records: dict[str, Record] = {}
        self.last_seen: dict[PeerId, float] = {}
        self.refused_bytes: Counter[str] = Counter()
        self.num_events = 0
        self.checkers = Checkers(self)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._history = hashlib.blake2b(digest_size=16)

    def _new_machine(self, index: int) -> Machine:
        rng, swarm = self.rng, self.swarm
        step_s = swarm.step_s * (1 + swarm.step_spread * rng.uniform(-1, 1))
        num = swarm.num_fragments
        return Machine(
            name=PeerId(f"machine-{index:03d}"),
            disk=Disk([FragmentLog() for _ in range(num)]),
            learner=LearnerModel(num, step_s, tokens_per_step=rng.choice((128, 256, 512))),
            clock_rate=1 + rng.uniform(-1e-3, 1e-3),
            clock_offset=rng.uniform(0, 1e4),
            replica=[None] * num,
        )

    # ---------------------------------------------------------------- time

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Schedules something; what is due at the same time happens in the order of scheduling."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, happen))

    def run(self, until: float) -> None:
        """Lets virtual time pass. Raises PromiseBroken, which names the seed."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._heap)
            happen()
        self.now = until

    def history(self) -> str:
        """A digest of everything that happened so far."""
        return self._history.copy().hexdigest()

    def tell(self, who: str, text: str) -> None:
        if self.trace:
            self.trace(self.now, who, text)

    # ---------------------------------------------------------------- machines

    @property
    def up(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.node]

    def node(self, name: PeerId) -> Node:
        node = self.machines[name].node
        assert node, f"{name} is down"
        return node

    def start(self, machine: Machine) -> None:
        """Starts the daemon with what its disk holds."""
        if machine.node:
            return
        disk = machine.disk
        machine.life += 1
        disk.incarnation += 1
        loaded = [log.load() for log in disk.fragments]
        machine.replica = [part[1] if part else None for part in loaded]
        machine.shelf, machine.pulled, machine.merged, machine.catching_up = {}, {}, {}, {}
        machine.node = Node(
            self._config(machine),
            KeyedSigner(machine.name),
            random.Random(self.rng.getrandbits(64)),
            machine.local(self.now),
            [part[0] if part else None for part in loaded],
            json.loads(disk.saved) if disk.saved else None,
        )
        machine.tokens_this_life = 0
        machine.processed_before = machine.node.state.ledger.totals().processed
        machine.wake_at = None
        self.last_seen[machine.name] = self.now
        self.tell(machine.name, f"starts for the {disk.incarnation}. time")
        self.checkers.started(machine)
        self._discover(machine, machine.life)
        self._persist(machine, machine.life)
        self._soon(machine, LEARNER_START_S, lambda: self._start_learner(machine))

    def start_all(self, spread_s: float = 1.0) -> None:
        for machine in self.machines.values():
            self.at(self.rng.uniform(0, spread_s), lambda m=machine: self.start(m))  # type: ignore[misc]

    def crash(self, machine: Machine) -> None:
        """kill -9: the memory is gone, the disk stays as it was last written."""
        if machine.node:
            self.tell(machine.name, "crashes")
            self._down(machine)

    def leave(self, machine: Machine) -> None:
        """The owner stops the daemon, which says goodbye and saves its ledger."""
        if machine.node:
            self.tell(machine.name, "leaves")
            self.handle(machine, events.LeaveAsked())
            self._save(machine)
            self._down(machine)

    def kill_learner(self, machine: Machine) -> None:
        learner = machine.learner
        if not (machine.node and learner.alive):
            return
        learner.stop()
        asked = [learner.asked[p] for p in sorted(learner.asked)]
        self.handle(machine, events.LearnerStopped("killed"))
        for round_id in asked:
            self.handle(machine, events.ContributionFailed(round_id, "the learner died"))
        self._soon(machine, LEARNER_RESTART_S, lambda: self._start_learner(machine))

    def settle(self) -> None:
        """Asks every living node to reach the newest heads and stay there."""
        for machine in self.up:
            self.handle(machine, events.SettleAsked())

    def _down(self, machine: Machine) -> None:
        machine.node = None
        machine.life += 1
        machine.learner.stop()
        self.last_seen[machine.name] = self.now

    def _config(self, machine: Machine) -> NodeConfig:
        return NodeConfig(
            run_id=RUN_ID,
            me=machine.name,
            name=machine.name,
            incarnation=machine.disk.incarnation,
            genesis_digests=tuple(map(genesis_digest, range(self.swarm.num_fragments))),
            genesis_donors=(GENESIS_DONOR,),
            times=self.swarm.times,
            term_merges=self.swarm.term_merges,
        )

    def _discover(self, machine: Machine, life: int) -> None:
        if machine.life == life:
            known = [
                name
                for name, seen in sorted(self.last_seen.items())
                if self.machines[name].node or self.now - seen < ANNOUNCED_S
            ]
            self.handle(machine, events.PeersFound(tuple(known)))
            self.at(self.now + DISCOVERY_S, lambda: self._discover(machine, life))

    def _persist(self, machine: Machine, life: int) -> None:
        if machine.life == life:
            self._save(machine)
            self.at(self.now + PERSIST_S, lambda: self._persist(machine, life))

    @staticmethod
    def _save(machine: Machine) -> None:
        assert machine.node
        machine.disk.saved = json.dumps(machine.node.save())

    def _soon(self, machine: Machine, delay_s: float, happen: Callable[[], None]) -> None:
        """Something inside the machine that ends with its present life."""
        life = machine.life
        self.at(self.now + delay_s, lambda: happen() if machine.life == life else None)

    def _answer(self, machine: Machine, delay_s: float, event: events.Event) -> None:
        self._soon(machine, delay_s, lambda: self.handle(machine, event))

    # ---------------------------------------------------------------- the learner

    def _start_learner(self, machine: Machine) -> None:
        machine.learner.start()
        self.handle(machine, events.LearnerStarted())

    def _boundary(self, machine: Machine, life: int) -> None:
        """A step boundary: counters first, then arrivals, then the snapshots that can be taken."""
        learner = machine.learner
        if learner.life != life or not learner.alive:
            return
        if learner.stepping:
            learner.step()
            machine.tokens_this_life += learner.tokens_per_step
            step_s = learner.step_s * learner.slowdown
            self.handle(machine, events.StepsDone(1, learner.tokens_per_step, step_s))
        for p in sorted(learner.waiting):
            version = learner.waiting[p].version
            tokens = learner.receive(p)
            self.handle(machine, events.FragmentInstalled(p, version, tokens))
        for p in sorted(learner.asked):
            self._snapshot(machine, p)
        learner.stepping = learner.complete
        if learner.stepping:
            pace = learner.step_s * learner.slowdown * self.rng.uniform(0.9, 1.1)
            learner.next_boundary = self.now + pace
            self._soon(machine, pace, lambda: self._boundary(machine, life))

    def _snapshot(self, machine: Machine, fragment: int) -> None:
        learner = machine.learner
        round_id, held = learner.asked[fragment], learner.held[fragment]
        if not held or held.version < round_id.version - 1 or learner.steps[fragment] < 1:
            return
        del learner.asked[fragment]
        if held.version > round_id.version - 1:
            reason = f"the learner is at v{held.version}"
            self.handle(machine, events.ContributionFailed(round_id, reason))
            return
        steps = learner.steps[fragment]
        tokens = steps * learner.tokens_per_step
        made = Contribution(round_id, machine.name, held.digest, steps, tokens)
        self._soon(machine, ENCODE_S, lambda: self._prepared(machine, made))

    def _prepared(self, machine: Machine, made: Contribution) -> None:
        machine.shelf[made.round.fragment] = made
        answer = events.ContributionPrepared(made.round, made.steps, made.tokens, num_bytes=1000)
        self.handle(machine, answer)

    # ---------------------------------------------------------------- the nodes

    def handle(self, machine: Machine, event: events.Event) -> None:
        """Hands an event to the node, looks at the promises, carries out what it wants."""
        node = machine.node
        if not node:
            return
        self.num_events += 1
        try:
            wanted = node.handle(event, machine.local(self.now))
        except AssertionError as error:
            raise PromiseBroken(self, machine.name, f"an assertion of the node: {error}") from error
        self._note(machine, event, wanted)
        self.checkers.before_actions(machine, event, wanted)
        for action in wanted:
            self._carry_out(machine, action)
        self.checkers.after(machine, event)
        self._schedule_wake(machine, node)

    def _note(
        self, machine: Machine, event: events.Event, wanted: Sequence[actions.Action]
    ) -> None:
        kinds = ",".join(type(action).__name__ for action in wanted)
        line = f"{self.now:.9f} {machine.name} {type(event).__name__} {kinds}\n"
        self._history.update(line.encode())

    def _schedule_wake(self, machine: Machine, node: Node) -> None:
        deadline = node.deadline
        if deadline is None:
            return
        when = max(machine.from_local(deadline), self.now) + 1e-6
        if machine.wake_at is None or when < machine.wake_at:
            machine.wake_at = when
            self._soon(machine, when - self.now, lambda: self._wake(machine, when))

    def _wake(self, machine: Machine, when: float) -> None:
        if machine.wake_at != when:
            return
        machine.wake_at = None
        self.handle(machine, events.Woke())
        self.checkers.woke(machine)

    def _carry_out(self, machine: Machine, action: actions.Action) -> None:  # noqa: C901
        match action:
            case actions.Send(peer, message):
                self.send(machine, peer, message)
            case actions.Note(text):
                self.tell(machine.name, text)
            case actions.PrepareContribution(round_id):
                machine.learner.asked[round_id.fragment] = round_id
            case actions.DropContribution(fragment):
                machine.shelf.pop(fragment, None)
                machine.learner.asked.pop(fragment, None)
            case actions.PullContribution(round_id, peer):
                self._pull(machine, round_id, peer)
            case actions.MergeRound(round_id, parts):
                self._soon(machine, MERGE_S, lambda: self._merge(machine, round_id, parts))
            case actions.DropRound(round_id):
                machine.pulled.pop(round_id, None)
                machine.merged.pop(round_id, None)
            case actions.CommitRecord(record):
                self._commit(machine, record)
            case actions.FetchRecords():
                self._fetch_records(machine, action)
            case actions.CatchUp():
                self._catch_up(machine, action)
            case actions.InstallFragment(fragment, version):
                self._install(machine, fragment, version)
            case _:
                assert_never(action)

    def send(self, machine: Machine, peer: PeerId, message: Message) -> None:
        receiver = self.machines.get(peer)
        if receiver:
            event = events.MessageArrived(machine.name, message)
            for delay_s in self.network.arrivals(machine.name, peer):
                self.at(self.now + delay_s, lambda: self.handle(receiver, event))

    def _install(self, machine: Machine, fragment: int, version: int) -> None:
        state, learner = machine.replica[fragment], machine.learner
        self.checkers.installing(machine, fragment, version, state)
        assert state
        learner.waiting[fragment] = state
        if not learner.stepping:
            life = learner.life
            self._soon(machine, HANDOVER_S, lambda: self._first_boundary(machine, life))

    def _first_boundary(self, machine: Machine, life: int) -> None:
        if not machine.learner.stepping:
            self._boundary(machine, life)

    # ---------------------------------------------------------------- rounds

    def _reaches(self, machine: Machine, peer: PeerId) -> Machine | None:
        other = self.machines.get(peer)
        usable = other and other.node and self.network.connected(machine.name, peer)
        return other if usable else None

    def _pull(self, machine: Machine, round_id: RoundId, peer: PeerId) -> None:
        machine.pulled.setdefault(round_id, {})
        usable = self._reaches(machine, peer)
        delay_s = self.network.round_trip_s() + CHUNK_S * CHUNKS if usable else STALL_S
        self._soon(machine, delay_s, lambda: self._pull_ends(machine, round_id, peer))

    def _pull_ends(self, machine: Machine, round_id: RoundId, peer: PeerId) -> None:
        other = self._reaches(machine, peer)
        found = other.shelf.get(round_id.fragment) if other else None
        answer: events.Event
        wanted = other and other.node and other.node.state.registers[round_id.fragment].offer
        if not other or not found or found.round != round_id:
            reason = "no such contribution" if other else "unreachable"
            answer = events.PullFailed(round_id, peer, reason)
        elif other is not machine and (not wanted or wanted.synchronizer != machine.name):
            reason = "it is not for this synchronizer"
            answer = events.PullFailed(round_id, peer, reason)
        elif other.lying and other is not machine:
            self.refused_bytes[peer] += 1
            answer = events.PullFailed(round_id, peer, "values that are not finite", hostile=True)
        else:
            if round_id in machine.pulled:
                machine.pulled[round_id][peer] = found
            answer = events.ContributionPulled(round_id, peer, found.steps, found.tokens)
        self.handle(machine, answer)

    def _merge(self, machine: Machine, round_id: RoundId, parts: tuple[Contributor, ...]) -> None:
        pulled, state = machine.pulled.get(round_id), machine.replica[round_id.fragment]
        if pulled is None:
            return
        if state is None or state.version != round_id.version - 1:
            self.handle(machine, events.MergeFailed(round_id, "the replica has moved on"))
            return
        merged = [pulled[part.peer] for part in parts]
        self.checkers.merging(machine, state, merged, parts)
        payload = digest("payload", [contribution.digest for contribution in merged])
        machine.merged[round_id] = after = state.apply(payload)
        self.handle(machine, events.RoundMerged(round_id, payload, 1000, after.digest))

    def _commit(self, machine: Machine, record: Record) -> None:
        round_id = RoundId(record.fragment, record.version, record.term, record.attempt)
        self.checkers.committing(machine, record)
        self.records[record.digest] = record
        self._put(machine, record, machine.merged.pop(round_id))
        machine.pulled.pop(round_id, None)

    def _put(self, machine: Machine, record: Record, state: State) -> None:
        machine.replica[record.fragment] = state
        machine.disk.fragments[record.fragment].put_merge(record, state)

    # ---------------------------------------------------------------- catching up

    def _fetch_records(self, machine: Machine, action: actions.FetchRecords) -> None:
        known = action.peer == GENESIS_DONOR or self._reaches(machine, action.peer)
        delay_s = self.network.round_trip_s() if known else STALL_S
        self._soon(machine, delay_s, lambda: self._records_arrive(machine, action))

    def _records_arrive(self, machine: Machine, action: actions.FetchRecords) -> None:
        peer, fragment = action.peer, action.fragment
        other = self._reaches(machine, peer)
        answer: events.Event
        if peer == GENESIS_DONOR:
            snapshot = events.SnapshotInfo(0, genesis_digest(fragment))
            answer = events.RecordsFetched(peer, fragment, (), (snapshot,))
        elif not other or not other.node:
            answer = events.RecordsFailed(peer, fragment, "unreachable")
        else:
            newest = other.disk.fragments[fragment].newest_snapshot()
            after = min([action.after_version, *(s.version - 1 for s in newest)])
            records = other.node.records_after(fragment, max(0, after))
            answer = events.RecordsFetched(peer, fragment, records, newest)
        self.handle(machine, answer)

    def _catch_up(self, machine: Machine, action: actions.CatchUp) -> None:
        fragment = action.fragment
        machine.catching_up[fragment] = machine.catching_up.get(fragment, 0) + 1
        self._next_chunk(machine, _Transfer(action))

    def _next_chunk(self, machine: Machine, transfer: _Transfer) -> None:
        if transfer.donor >= len(transfer.catch_up.donors):
            self._catch_up_fails(machine, transfer, "no donor has what is needed")
            return
        donor = transfer.catch_up.donors[transfer.donor]
        has = self._holds(machine, donor, transfer)
        if has is None:
            self._soon(machine, STALL_S, lambda: self._next_donor(machine, transfer))
        elif not has:
            self._soon(
                machine, self.network.round_trip_s(), lambda: self._next_donor(machine, transfer)
            )
        else:
            self._soon(machine, CHUNK_S, lambda: self._chunk_ends(machine, transfer, donor))

    def _next_donor(self, machine: Machine, transfer: _Transfer) -> None:
        transfer.donor += 1
        self._next_chunk(machine, transfer)

    def _holds(self, machine: Machine, donor: PeerId, transfer: _Transfer) -> bool | None:
        """Whether the donor has the current item; None when it cannot be reached."""
        fragment, record = transfer.catch_up.fragment, transfer.record()
        if donor == GENESIS_DONOR:
            snapshot = transfer.catch_up.snapshot
            return record is None and snapshot is not None and snapshot.version == 0
        other = self._reaches(machine, donor)
        if not other:
            return None
        log = other.disk.fragments[fragment]
        if record:
            return log.has_merge(record)
        assert transfer.catch_up.snapshot
        return log.has_snapshot(transfer.catch_up.snapshot)

    def _chunk_ends(self, machine: Machine, transfer: _Transfer, donor: PeerId) -> None:
        """A chunk that arrived stays, whoever gave it; wrong bytes show when the item is whole."""
        if donor != GENESIS_DONOR and not self._reaches(machine, donor):
            self._next_donor(machine, transfer)
            return
        transfer.chunk += 1
        if transfer.chunk < CHUNKS:
            self._next_chunk(machine, transfer)
            return
        transfer.chunk = 0
        if donor != GENESIS_DONOR and self.machines[donor].lying:
            self._accuse(machine, donor)
            self._next_donor(machine, transfer)
            return
        self._soon(machine, APPLY_S, lambda: self._item_arrives(machine, transfer))

    def _accuse(self, machine: Machine, donor: PeerId) -> None:
        self.refused_bytes[donor] += 1
        self.handle(machine, events.WrongBytes(donor, "bytes of another digest"))

    def _item_arrives(self, machine: Machine, transfer: _Transfer) -> None:
        catch_up, record = transfer.catch_up, transfer.record()
        fragment, snapshot = catch_up.fragment, catch_up.snapshot
        if record is None:
            assert snapshot
            state = State(snapshot.version, snapshot.state_digest)
            machine.replica[fragment] = state
            log = machine.disk.fragments[fragment]
            log.put_snapshot(state, catch_up.snapshot_record)
        else:
            before = machine.replica[fragment]
            assert before and before.version == record.version - 1, (machine.name, before, record)
            state = before.apply(record.payload_digest)
            if state.digest != record.state_digest:
                self._catch_up_fails(machine, transfer, "our state had diverged", diverged=True)
                return
            self._put(machine, record, state)
        transfer.item, transfer.donor = transfer.item + 1, 0
        if transfer.item == transfer.num_items:
            machine.catching_up[fragment] -= 1
        event = events.StateReached(fragment, state.version, state.digest, record)
        self.handle(machine, event)
        if record is None:
            self._save(machine)  # the disk has another lineage now, on which other tokens are lost
        if transfer.item < transfer.num_items:
            self._next_chunk(machine, transfer)

    def _catch_up_fails(
        self, machine: Machine, transfer: _Transfer, reason: str, diverged: bool = False
    ) -> None:
        fragment = transfer.catch_up.fragment
        machine.catching_up[fragment] -= 1
        self.handle(machine, events.CatchUpFailed(fragment, reason, diverged))
