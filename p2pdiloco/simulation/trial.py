"""One trial: a swarm with faults drawn from a seed, then calm, then everybody settles; all promises
are looked at.
"""

import random
from collections.abc import Callable
from contextlib import suppress

from p2pdiloco.protocol.topology import PAIRS, GossipPlan, Topology, everybody, hypercube
from p2pdiloco.simulation.checkers import PromiseBroken
from p2pdiloco.simulation.network import HALL_LINKS, HOME_LINKS
from p2pdiloco.simulation.schedule import draw_schedule, inflict
from p2pdiloco.simulation.world import Swarm, World

FAULTS_BEGIN_S = 8.0
FAULTS_END_S = 45.0
RESUME_S = 30.0
"""After the last fault, all living nodes are on one lineage and train, and each fragment was merged
again within this: the patience with a synchronizer that is of no use, and a round. States that are
missing must fit through the uplinks of those who have them: at most 1.6 MB each here. (With 8 MB,
four members that fetch four fragments from one DSL line take longer than this.)
"""
WATCHED_S = 10.0
"""At the end of which no learner has waited for anything."""
SETTLE_S = 15.0
STEP_S = 1.0
"""How often it is looked whether a promise is kept already: its time need not be waited for."""


def run_trial(seed: int, trace: Callable[[float, str, str], None] | None = None) -> World:
    """Raises PromiseBroken; returns the world at the end."""
    rng = random.Random(seed)
    payload_bytes = rng.choice((30_000, 200_000))
    swarm = Swarm(
        num_machines=rng.randint(3, 6),
        num_fragments=rng.randint(2, 4),
        inner_steps=rng.choice((6, 10)),
        overlap_steps=rng.choice((1, 2, 3)),
        quorum=rng.choice((1, 1, 2)),
        term_merges=rng.choice((1, 4)),
        links=rng.choice((HALL_LINKS, HOME_LINKS)),
        payload_bytes=payload_bytes,
        state_bytes=8 * payload_bytes,
    )
    world = World(seed, swarm, trace)
    world.start_all(spread_s=rng.choice((0.5, 6.0)))
    num_faults = rng.randint(3, 8)
    names = list(world.machines)
    schedule = draw_schedule(rng, names, FAULTS_BEGIN_S, FAULTS_END_S, num_faults)
    calm_from = inflict(world, schedule)
    world.run(until=calm_from)
    finish(world)
    return world


def finish(world: World) -> None:
    """From now on nothing goes wrong any more: what must hold afterwards."""
    checkers, calm_from = world.checkers, world.now
    resumed_by = calm_from + RESUME_S
    _until(world, resumed_by, lambda: checkers.resumed_since(calm_from))
    steps = checkers.count_steps()
    world.run(until=world.now + WATCHED_S)
    checkers.kept_pace(steps, WATCHED_S)
    world.settle()
    _until(world, max(world.now, resumed_by) + SETTLE_S, checkers.one_head)
    checkers.ledgers_meet_lineages()


MIXES: tuple[tuple[Topology, Topology | None, bool], ...] = (
    (PAIRS, None, False),
    (hypercube, None, False),
    (everybody, None, False),
    (everybody, PAIRS, False),
    (hypercube, everybody, True),
)
"""Mix1, Mix2, and whether that ends by a quorum."""
MIXED_S = 60.0
"""After the last fault, everybody has mixed again within this: some rounds, in which the partner
may be one that is left alone for wrong bytes, or missing (of five in a hypercube one mixes in every
third round alone).
"""
ONE_SIDED_MAX = 0.25
"""Share of the exchanges that one end alone counts, while messages are lost and machines die."""
SPREAD_MAX = 60.0
"""Drifts of one round, after the last fault: pairs settle at 3 (a tenth of seeds is above 6), and
who came back from a long absence is further off for some rounds."""


def run_gossip_trial(seed: int, trace: Callable[[float, str, str], None] | None = None) -> World:
    """The same for a swarm without a synchronizer."""
    rng = random.Random(seed)
    mix1, mix2, by_quorum = rng.choice(MIXES)
    swarm = Swarm(
        num_machines=rng.randint(3, 6),
        num_fragments=rng.randint(2, 3),
        inner_steps=rng.choice((6, 10)),
        quorum=2,
        links=rng.choice((HALL_LINKS, HOME_LINKS)),
        payload_bytes=rng.choice((30_000, 200_000)),
        state_bytes=400_000,
        gossip=GossipPlan(mix1=mix1, mix2=mix2, seed=str(seed), by_quorum=by_quorum),
    )
    world = World(seed, swarm, trace)
    world.start_all(spread_s=rng.choice((0.5, 6.0)))
    num_faults = rng.randint(3, 8)
    names = list(world.machines)
    schedule = draw_schedule(rng, names, FAULTS_BEGIN_S, FAULTS_END_S, num_faults)
    world.run(until=inflict(world, schedule))
    finish_gossip(world)
    return world


def finish_gossip(world: World) -> None:
    """From now on nothing goes wrong any more."""
    checkers, calm_from, plan = world.checkers, world.now, world.swarm.gossip
    assert plan
    _until(world, calm_from + MIXED_S, lambda: checkers.mixed_since(calm_from))
    steps, resumed = checkers.count_steps(), world.now
    world.run(until=world.now + WATCHED_S)
    if plan.mix2 is None:
        checkers.kept_pace(steps, WATCHED_S)
    world.settle()
    _until(world, world.now + SETTLE_S, checkers.all_settled)
    checkers.mixed_alike(resumed, resumed + WATCHED_S / 2, ONE_SIDED_MAX, SPREAD_MAX)


def _until(world: World, limit: float, holds: Callable[[], None]) -> None:
    """Runs until a promise is kept; raises what is broken if it is not by then."""
    while world.now + STEP_S < limit:
        world.run(until=world.now + STEP_S)
        with suppress(PromiseBroken):
            return holds()
    world.run(until=limit)
    holds()
