"""What lying nodes do. Against each kind something else can be promised (ARCHITECTURE.md):

A `Liar` breaks the protocol: wrong bytes, forged signatures, impossible heads. Everybody refuses
what it sends and leaves it alone.

A `Forger` signs merge records, under its own name, as only it can: of merges that never took place,
with contributors who gave nothing (it serves the payload, so everybody follows: a synchronizer is
trusted with its round, and its name stands in the record); two with one parent (the heavier wins);
with a state that the payload does not lead to (nobody follows for long). Replicas stay identical,
ledgers say what the records say, and merging goes on when it ends.
"""

from dataclasses import dataclass, replace

from p2pdiloco.protocol.election import term_of
from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.wire import (
    Committed,
    ContributionReady,
    Head,
    Heartbeat,
    Message,
    RoundOpened,
)
from p2pdiloco.simulation.disk import State, digest
from p2pdiloco.simulation.machine import KeyedSigner, Machine
from p2pdiloco.simulation.world import RUN_ID, World

TIMES = 4
"""How often a liar lies while the fault lasts."""


@dataclass(frozen=True, slots=True)
class Liar:
    """Serves wrong bytes, and sends what breaks the protocol."""

    name: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        machine.lying += 1
        for index in range(TIMES):
            moment = world.now + index * self.duration_s / TIMES
            world.at(moment, lambda: _tell_lies(world, machine))

    def end(self, world: World) -> None:
        world.machines[self.name].lying -= 1


@dataclass(frozen=True, slots=True)
class Forger:
    """Signs merge records of merges that never took place."""

    name: PeerId
    duration_s: float

    def begin(self, world: World) -> None:
        machine = world.machines[self.name]
        for index in range(TIMES):
            moment = world.now + index * self.duration_s / TIMES
            world.at(moment, lambda: _forge(world, machine))

    def end(self, world: World) -> None:
        """What it has signed stays true to its signature."""


def _forge(world: World, machine: Machine) -> None:
    node, rng = machine.node, world.rng
    if not node:
        return
    fragment = rng.randrange(world.swarm.num_fragments)
    chain, state = node.state.registers[fragment].chain, machine.replica[fragment]
    if chain is None or state is None or state.version != chain.version:
        return
    others = [peer for peer in world.machines if peer != machine.name]
    first = _forged(world, machine, state, fragment)
    match rng.choice(("garbage", "garbage", "two", "no such state")):
        case "two":
            second = _forged(world, machine, state, fragment)
            for index, peer in enumerate(others):
                world.send(machine, peer, Committed((first, second)[index % 2]))
        case "no such state":
            wrong = replace(first, state_digest=digest("state", rng.random()))
            _tell(world, machine, others, _signed(world, machine, wrong))
        case _:
            _tell(world, machine, others, first)


def _tell(world: World, machine: Machine, others: list[PeerId], record: Record) -> None:
    for peer in others:
        world.send(machine, peer, Committed(record))


def _forged(world: World, machine: Machine, state: State, fragment: int) -> Record:
    """It extends the head as this machine sees it, and leads where it says."""
    assert machine.node
    rng, register = world.rng, machine.node.state.registers[fragment]
    assert register.chain
    payload, version = digest("garbage", rng.random()), state.version + 1
    names = rng.sample(sorted(world.machines), rng.randint(1, len(world.machines)))
    parts = tuple(Contributor(name, rng.randint(1, 20_000), 10) for name in sorted(names))
    record = Record(
        run_id=RUN_ID,
        fragment=fragment,
        version=version,
        parent=register.chain.digest,
        payload_digest=payload,
        payload_bytes=world.swarm.payload_bytes,
        state_digest=state.apply(payload).digest,
        contributors=parts,
        refused=(),
        term=term_of(version, world.swarm.term_merges),
        attempt=register.fence[1],
        tokens_total=register.chain.tokens_total + sum(part.tokens for part in parts),
        reason="a merge that never took place",
        synchronizer=machine.name,
    )
    return _signed(world, machine, record)


def _signed(world: World, machine: Machine, record: Record) -> Record:
    record = record.signed(KeyedSigner(machine.name))
    world.records[record.digest] = record
    machine.forged.add(record.payload_digest)
    return record


def _tell_lies(world: World, machine: Machine) -> None:
    if not machine.node:
        return
    for peer in world.machines:
        if peer != machine.name:
            world.send(machine, peer, _lie(world, machine))


def _lie(world: World, machine: Machine) -> Message:
    """Well-formed messages, as the decoder lets no others in, that are wrong in every other way."""
    assert machine.node
    rng, num = world.rng, world.swarm.num_fragments
    fragment = rng.randrange(2 * num)
    register = machine.node.state.registers[fragment % num]
    version = register.version + rng.choice((1, 2, 50))
    round_id = RoundId(fragment, max(1, version), rng.randrange(2), rng.randrange(5))
    record = Record(
        run_id=rng.choice(("simulation", "another")),
        fragment=fragment,
        version=max(1, version),
        parent=register.chain.digest if register.chain else digest("?"),
        payload_digest=digest("payload", rng.random()),
        payload_bytes=1000,
        state_digest=digest("state", rng.random()),
        contributors=(Contributor(machine.name, 2**49, 10),),
        refused=(),
        term=round_id.term,
        attempt=round_id.attempt,
        tokens_total=2**50,
        reason="a lie",
        synchronizer=rng.choice(sorted(world.machines)),
        signature=b"forged",
    )
    heartbeat = Heartbeat(
        run_id=f"another {rng.random()}",
        protocol_version=1,
        incarnation=10**6,
        sequence=1,
        name=machine.name,
        ready=True,
        uplink_mb_s=1e6,
        step_s=0.0,
        tokens_per_s=1e9,
        local_steps=(10**6,) * num,
        heads=(Head(10**6, digest("head"), 2**60),) * num,
        sightings=(),
    )
    report = ContributionReady(round_id, 10**6, 2**49, 1, 0.0)
    short = replace(heartbeat, run_id="simulation", heads=())
    return rng.choice(
        (Committed(record), heartbeat, short, report, RoundOpened(round_id, record.parent))
    )
