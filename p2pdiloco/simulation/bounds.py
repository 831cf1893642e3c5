"""Everything that a node, its machine and its disk keep has a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.protocol.follower import PURSUITS_MAX
from p2pdiloco.protocol.lineage import RECORDS_KEPT
from p2pdiloco.protocol.pauses import PAUSES_MAX
from p2pdiloco.protocol.state import REFUSALS_KEPT, ROUNDS_KEPT, NodeState
from p2pdiloco.simulation.disk import SNAPSHOT_EVERY, SNAPSHOTS_KEPT, WRITES_MAX
from p2pdiloco.simulation.machine import INBOX_MAX, Machine
from p2pdiloco.simulation.promises import at_most

if TYPE_CHECKING:
    from p2pdiloco.simulation.world import World

MERGES_KEPT = SNAPSHOTS_KEPT * SNAPSHOT_EVERY
"""Payloads of a fragment on disk."""


def out_of_bounds(world: World, machine: Machine, state: NodeState) -> str | None:
    """What there is too much of, if anything."""
    num_open = 0
    num_busy = 0
    for register, log in zip(state.registers, machine.disk.fragments, strict=True):
        num_open += register.round is not None
        num_busy += register.busy
        num_records = len(register.chain.records) if register.chain else 0
        if max(num_records, len(log.records)) > RECORDS_KEPT:
            return at_most("records", max(num_records, len(log.records)), RECORDS_KEPT)
        if len(log.merges) > MERGES_KEPT or len(log.snapshots) > SNAPSHOTS_KEPT:
            return f"{len(log.merges)} merges and {len(log.snapshots)} snapshots are on disk"
    kept = (
        ("open rounds", num_open, world.swarm.overlap_steps),
        ("questions", num_busy, PURSUITS_MAX),
        ("rounds remembered", len(state.rounds), ROUNDS_KEPT),
        ("members", len(state.membership.members), len(world.machines) - 1),
        ("strikes", len(state.strikes), PAUSES_MAX),
        ("peers of no use", len(state.unhelpful), PAUSES_MAX),
        ("refusals", len(state.refusals), REFUSALS_KEPT + 1),
        ("outer gradients", len(machine.shelf), len(machine.replica)),
        ("rounds with outer gradients", len(machine.pulled), num_open),
        ("merges not committed", len(machine.merged), num_open),
        ("messages in the inbox", machine.messages_waiting, INBOX_MAX),
        ("writes that wait", machine.disk.waiting, WRITES_MAX),
    )
    for what, count, most in kept:
        if count > most:
            return at_most(what, count, most)
    return None
