"""Machines in virtual time: a heap of (time, serial, what happens), one seeded Random, and every
action of the protocol carried out with plausible delays.

The nodes are the production ones. Nothing here decides anything for them; what they ask of others
is in `errands.py`, what goes wrong in `faults.py`, what must hold in `checkers.py`. `history` is a
digest of all that happened: the same seed gives the same one.
"""

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.state import NodeConfig
from p2pdiloco.protocol.topology import GossipPlan
from p2pdiloco.protocol.wire import Message
from p2pdiloco.simulation.checkers import Checkers, PromiseBroken
from p2pdiloco.simulation.disk import WRITES_MAX, Disk, genesis_digest
from p2pdiloco.simulation.errands import GENESIS_DONOR, Errands
from p2pdiloco.simulation.learner import LEARNER_START_S, LearnerModel, Training
from p2pdiloco.simulation.machine import INBOX_MAX, Clock, KeyedSigner, Machine
from p2pdiloco.simulation.mixing import Mixings
from p2pdiloco.simulation.network import (
    HALL_LINKS,
    HOME,
    RELAY_LINK,
    LinkKind,
    Network,
    Quality,
)

RUN_ID = "simulation"
ANNOUNCED_S = 60.0
"""Discovery still names a machine for so long after it went down."""
DRIFT = 0.03
"""Clocks go too fast or too slow by up to this share: quartz is a thousand times better, a virtual
machine whose host is overcommitted is not."""


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
    links: LinkKind = HALL_LINKS
    payload_bytes: int = 100_000
    """Of an outer gradient and of a merge of one fragment."""
    state_bytes: int = 1_000_000
    """Of a whole state of one fragment."""
    quiet_steps: int = 1
    """Steps that a learner takes in one event while nothing waits for a boundary, to simulate less:
    its counters are up to so many steps late elsewhere.
    """
    persist_s: float = 2.0
    """From one save of a ledger to the next."""
    discovery_s: float = 15.0
    """From one look for other machines to the next."""
    gossip: GossipPlan | None = None
    """Without a synchronizer."""
    blocks: bool = False
    """Synchronous DiLoCo."""
    mixes_below_quorum: bool = False

    @property
    def times(self) -> SyncTimes:
        return SyncTimes(
            inner_steps=self.inner_steps,
            num_fragments=self.num_fragments,
            overlap_steps=self.overlap_steps,
            quorum=self.quorum,
            grace_factor=self.grace_factor,
        )


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
        self.network.attach(GENESIS_DONOR, RELAY_LINK)
        self.machines = {m.name: m for m in map(self._new_machine, range(swarm.num_machines))}
        self.records: dict[str, Record] = {}
        self._names = sorted(self.machines)
        self.last_seen: dict[PeerId, float] = {}
        self.num_events = 0
        self.errands = Errands(self)
        self.training = Training(self)
        self.mixings = Mixings(self)
        self.checkers = Checkers(self)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._history = hashlib.blake2b(digest_size=16)

    def _new_machine(self, index: int) -> Machine:
        rng, swarm = self.rng, self.swarm
        name, num = PeerId(f"machine-{index:03d}"), swarm.num_fragments
        self.network.attach(name, swarm.links.draw(rng))
        step_s = swarm.step_s * (1 + swarm.step_spread * rng.uniform(-1, 1))
        return Machine(
            name=name,
            disk=Disk.empty(num),
            learner=LearnerModel(num, step_s, tokens_per_step=rng.choice((128, 256, 512))),
            clock=Clock(rate=1 + rng.uniform(-DRIFT, DRIFT), offset=rng.uniform(0, 1e4)),
            replica=[None] * num,
            newest=[None] * num,
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
        machine.newest = [None] * len(loaded)
        machine.forget()
        machine.node = Node(
            self._config(machine),
            KeyedSigner(machine.name),
            random.Random(self.rng.getrandbits(64)),
            machine.local(self.now),
            [part[0] if part else None for part in loaded],
            json.loads(json.dumps(disk.saved)) if disk.saved else None,
        )
        machine.tokens_this_life = 0
        machine.processed_before = machine.node.state.ledger.totals().processed
        machine.wake_at = None
        self.last_seen[machine.name] = self.now
        self.tell(machine.name, f"starts for the {disk.incarnation}. time")
        self.checkers.started(machine)
        self._discover(machine, machine.life)
        self._persist(machine, machine.life)
        self.soon(machine, LEARNER_START_S, lambda: self.training.start(machine))

    def start_all(self, spread_s: float = 1.0) -> None:
        for machine in self.machines.values():
            self.at(self.rng.uniform(0, spread_s), lambda m=machine: self.start(m))  # type: ignore[misc]

    def crash(self, machine: Machine) -> None:
        """kill -9: the memory is gone, the disk stays as it was last written."""
        if machine.node:
            self.tell(machine.name, "crashes")
            self._down(machine)

    def leave(self, machine: Machine) -> None:
        """The owner stops the daemon, which says goodbye and saves its ledger. One that stands
        still hears nothing of it: it is killed.
        """
        if machine.stalled:
            self.crash(machine)
        elif machine.node:
            self.tell(machine.name, "leaves")
            self.handle(machine, events.LeaveAsked())
            self.save(machine)
            self._down(machine)

    def kill_learner(self, machine: Machine) -> None:
        self.training.kill(machine)

    def stall(self, machine: Machine, with_learner: bool) -> int:
        """SIGSTOP to the daemon, or to all that runs there. Returns what `go_on` wants to know."""
        machine.stalled += 1
        machine.learner.stalled += with_learner
        return machine.life

    def go_on(self, machine: Machine, with_learner: bool, life: int) -> None:
        """SIGCONT; a machine that was started anew meanwhile did not stand still."""
        if machine.life != life:
            return
        machine.stalled -= 1
        machine.learner.stalled -= with_learner
        self.training.go_on(machine)
        while machine.backlog and machine.answers:
            machine.backlog.popleft()()
        machine.messages_waiting = 0

    def jump(self, machine: Machine, seconds: float) -> None:
        """Its clock is set forward, as after a suspension."""
        machine.clock.jump(seconds)
        self._reschedule_wake(machine)

    def drift(self, machine: Machine, rate: float) -> None:
        machine.clock.go_at(rate, self.now)
        self._reschedule_wake(machine)

    def settle(self) -> None:
        """Asks every living node to reach the newest heads and stay there."""
        for machine in self.up:
            self.handle(machine, events.SettleAsked())

    def _down(self, machine: Machine) -> None:
        machine.node = None
        machine.life += 1
        machine.learner.stop()
        machine.forget()
        machine.disk.power_lost()
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
            gossip=self.swarm.gossip,
            blocks=self.swarm.blocks,
            mixes_below_quorum=self.swarm.mixes_below_quorum,
        )

    def _discover(self, machine: Machine, life: int) -> None:
        if machine.life == life:
            known = [
                name
                for name in self._names
                if self.machines[name].node
                or self.now - self.last_seen.get(name, float("-inf")) < ANNOUNCED_S
            ]
            self.handle(machine, events.PeersFound(tuple(known)))
            again = self.now + self.swarm.discovery_s
            self.at(again, lambda: self._discover(machine, life))

    def _persist(self, machine: Machine, life: int) -> None:
        if machine.life == life:
            self.save(machine)
            self.soon(machine, self.swarm.persist_s, lambda: self._persist(machine, life))

    def save(self, machine: Machine) -> None:
        """Keeps what a later life of the node needs."""
        assert machine.node
        disk, saved = machine.disk, machine.node.save()

        def keep() -> None:
            disk.saved = saved

        self.write(machine, keep)

    def write(self, machine: Machine, write: Callable[[], None]) -> bool:
        """Writes in order, each when the disk is through with those before; False when there is no
        room.
        """
        disk = machine.disk
        if disk.full or disk.waiting >= WRITES_MAX:
            return False
        if disk.write_s == 0 and disk.free_at <= self.now:
            write()
            return True
        disk.free_at = max(disk.free_at, self.now) + disk.write_s
        disk.waiting += 1
        life = machine.life
        self.at(disk.free_at, lambda: self._written(machine, life, write))
        return True

    @staticmethod
    def _written(machine: Machine, life: int, write: Callable[[], None]) -> None:
        if machine.life == life:
            machine.disk.waiting -= 1
            write()

    def soon(self, machine: Machine, delay_s: float, happen: Callable[[], None]) -> None:
        """Something that the daemon does, unless its present life ends before; while it is stopped,
        it waits.
        """
        life = machine.life

        def fall_due() -> None:
            if machine.life != life:
                return
            if machine.stalled:
                machine.backlog.append(happen)
            else:
                happen()

        self.at(self.now + delay_s, fall_due)

    # ---------------------------------------------------------------- the nodes

    def handle(self, machine: Machine, event: events.Event) -> None:
        """Hands an event to the node, looks at the promises, carries out what it wants."""
        node = machine.node
        if not node:
            return
        if machine.stalled:
            machine.backlog.append(lambda: self.handle(machine, event))
            return
        self.num_events += 1
        try:
            wanted = node.handle(event, machine.local(self.now))
        except Exception as error:  # whatever it is, it would have ended the daemon
            raise PromiseBroken(self, machine.name, f"the node failed: {error!r}") from error
        if isinstance(event, events.StepsDone):
            machine.tokens_this_life += event.tokens
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
        when = max(machine.clock.when(deadline), self.now) + 1e-6
        if machine.wake_at is None or when < machine.wake_at:
            machine.wake_at = when
            self.soon(machine, when - self.now, lambda: self._wake(machine, when))

    def _reschedule_wake(self, machine: Machine) -> None:
        machine.wake_at = None
        if machine.node:
            self._schedule_wake(machine, machine.node)

    def _wake(self, machine: Machine, when: float) -> None:
        if machine.wake_at != when:
            return
        machine.wake_at = None
        self.handle(machine, events.Woke())
        self.checkers.woke(machine)

    def _carry_out(self, machine: Machine, action: actions.Action) -> None:  # noqa: C901
        errands = self.errands
        match action:
            case actions.Send(peer, message):
                self.send(machine, peer, message)
            case actions.Note(text):
                self.tell(machine.name, text)
            case actions.PrepareContribution(round_id, hold):
                self.training.ask(machine, round_id, hold)
            case actions.DropContribution(fragment):
                machine.shelf.pop(fragment, None)
                machine.learner.asked.pop(fragment, None)
            case actions.PullContribution(round_id, peer):
                errands.pull(machine, round_id, peer)
            case actions.MergeRound(round_id, parts):
                errands.merge(machine, round_id, parts)
            case actions.DropRound(round_id):
                machine.pulled.pop(round_id, None)
                machine.merged.pop(round_id, None)
            case actions.CommitRecord(record):
                errands.commit(machine, record)
            case actions.FetchRecords():
                errands.fetch_records(machine, action)
            case actions.CatchUp():
                errands.catch_up(machine, action)
            case actions.InstallFragment(fragment, version):
                self.training.install(machine, fragment, version)
            case actions.OpenMix():
                self.mixings.open(machine, action)
            case actions.FetchMix(mix, peer):
                self.mixings.fetch(machine, mix, peer)
            case actions.CutRound() | actions.FinishRound():
                self.mixings.end(machine, action)
            case actions.TakeValues() | actions.BlendValues():
                self.mixings.visit(machine, action)
            case _:
                assert_never(action)

    def send(self, machine: Machine, peer: PeerId, message: Message) -> None:
        receiver = self.machines.get(peer)
        if receiver:
            event = events.MessageArrived(machine.name, message)
            for delay_s in self.network.arrivals(machine.name, peer):
                self.at(self.now + delay_s, lambda: self._arrives(receiver, event))

    def _arrives(self, machine: Machine, event: events.MessageArrived) -> None:
        """The inbox of a daemon that stands still fills up, then it refuses."""
        if machine.stalled and machine.node:
            if machine.messages_waiting >= INBOX_MAX:
                machine.messages_refused += 1
                return
            machine.messages_waiting += 1
        self.handle(machine, event)
