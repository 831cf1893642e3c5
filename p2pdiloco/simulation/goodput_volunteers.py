"""What the paper does not have: volunteers at home, and no central syncer.

N people own a machine each; it is on for hours and off for hours, heavy-tailed; some close the lid
(kill), some stop it properly. All nodes run the production protocol in the `World`, over home links
(`network.HOME_LINKS`: 10 to 40 Mbit/s up, half of them behind routers that nobody can dial). Who
comes fetches what it lacks over its downlink; the synchronizer is one of them.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from p2pdiloco.protocol.ledger import Totals
from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.simulation.goodput_parallel import RESOLUTION_S
from p2pdiloco.simulation.machine import Machine
from p2pdiloco.simulation.network import HOME_LINKS
from p2pdiloco.simulation.world import Swarm, World

SESSION_S = 3 * 3600.0
ABSENCE_S = 6 * 3600.0
"""Means of how long a machine is on and off."""
SESSION_SHAPE = 0.7
"""Of their Weibull distributions; below 1: most sessions are short, a few last for days."""
PAST_S = 14 * 24 * 3600.0
"""Sessions are drawn from so long ago, that whoever is on at the beginning is usual."""
LID_SHARE = 0.5
"""Of sessions that end without goodbye."""
PARAMETERS = 10_700_000
"""The run spec's preset `small`."""
STEP_S = 10.0
STEP_SPREAD = 0.5
INNER_STEPS = 24
NUM_FRAGMENTS = 6
OVERLAP_STEPS = 2
LEAD_S = 600.0
"""The swarm runs for so long before anything is counted."""


@dataclass(frozen=True, slots=True)
class Volunteers:
    """Shares are of the time that the nodes were online, from the end of the lead on; 0 where that
    was none.
    """

    num_volunteers: int
    hours: float
    online: float
    """Mean number of nodes."""
    joins: int
    computing: float
    """Share of online time spent on inner steps."""
    merged: float
    """Share of online time spent on steps that came into the model, the mean over fragments."""
    merged_median: float
    """The same for the median node."""
    uptime: float
    merges_per_hour: float
    contributors: float
    """Mean per merge."""
    forks: int
    fates: dict[str, float]
    """Fate -> share of the token-fragments that were processed, from the beginning."""


def run_volunteers(num_volunteers: int, hours: float, seed: int) -> Volunteers:
    """Raises PromiseBroken if the protocol breaks a promise."""
    swarm = Swarm(
        num_machines=num_volunteers,
        num_fragments=NUM_FRAGMENTS,
        inner_steps=INNER_STEPS,
        overlap_steps=OVERLAP_STEPS,
        step_s=STEP_S,
        step_spread=STEP_SPREAD,
        links=HOME_LINKS,
        payload_bytes=PARAMETERS // NUM_FRAGMENTS,
        state_bytes=8 * PARAMETERS // NUM_FRAGMENTS,
    )
    world = World(seed, swarm)
    house = _House(world, LEAD_S + hours * 3600)
    world.run(until=LEAD_S)
    house.count_from_now()
    world.run(until=house.end)
    return house.result()


def sessions(rng: random.Random, end: float) -> Iterator[tuple[float, float]]:
    """(on, off) moments of one machine in 0 .. end, ascending."""
    usual = SESSION_S + ABSENCE_S
    now = -PAST_S - rng.uniform(0, usual)
    while now < end:
        off = now + _stretch(rng, SESSION_S)
        if off > 0:
            yield max(now, 0.0), min(off, end)
        now = off + _stretch(rng, ABSENCE_S)


def _stretch(rng: random.Random, mean_s: float) -> float:
    return rng.weibullvariate(mean_s / math.gamma(1 + 1 / SESSION_SHAPE), SESSION_SHAPE)


class _House:
    """Everybody's sessions, and what is counted of them."""

    def __init__(self, world: World, end: float):
        self.world, self.end = world, end
        self.joins = 0
        self._since = 0.0
        self._records: set[str] = set()
        self._online: dict[PeerId, list[tuple[float, float]]] = {}
        self._totals: dict[PeerId, Totals] = {}
        self._slots = self._slots_up = 0
        self._looks_online = self._looks_stepping = 0
        for machine in world.machines.values():
            rng = random.Random(f"sessions {world.seed} {machine.name}")
            self._online[machine.name] = list(sessions(rng, end))
            for on, off in self._online[machine.name]:
                world.at(on, lambda m=machine: self._begin(m))  # type: ignore[misc]
                if off < end:
                    leave = world.crash if rng.random() < LID_SHARE else world.leave
                    world.at(off, lambda m=machine, leave=leave: self._stop(m, leave))  # type: ignore[misc]

    def _begin(self, machine: Machine) -> None:
        self.joins += 1
        self.world.start(machine)

    def _stop(self, machine: Machine, leave: Callable[[Machine], None]) -> None:
        if machine.node:
            self._totals[machine.name] = self.world.checkers.totals(machine)
        leave(machine)

    def count_from_now(self) -> None:
        world = self.world
        self._since, self.joins = world.now, 0
        self._records = set(world.records)
        self._look()

    def _look(self) -> None:
        stepping = [machine.learner.stepping for machine in self.world.up]
        self._slots += 1
        self._slots_up += any(stepping)
        self._looks_online += len(stepping)
        self._looks_stepping += sum(stepping)
        self.world.at(self.world.now + RESOLUTION_S, self._look)

    def result(self) -> Volunteers:
        world, hours = self.world, (self.end - self._since) / 3600
        online_s = {name: self._online_s(name) for name in world.machines}
        merges = [r for digest, r in world.records.items() if digest not in self._records]
        merged_s = self._merged_s(merges)
        shares = [merged_s[name] / spent for name, spent in online_s.items() if spent > 0]
        total_s = sum(online_s.values())
        return Volunteers(
            num_volunteers=len(world.machines),
            hours=hours,
            online=total_s / (self.end - self._since),
            joins=self.joins,
            computing=self._looks_stepping / max(1, self._looks_online),
            merged=sum(merged_s.values()) / total_s if total_s else 0.0,
            merged_median=median(shares) if shares else 0.0,
            uptime=self._slots_up / self._slots,
            merges_per_hour=len(merges) / hours,
            contributors=fmean(len(record.contributors) for record in merges) if merges else 0.0,
            forks=world.checkers.forks,
            fates=self._fates(),
        )

    def _online_s(self, name: PeerId) -> float:
        return sum(max(0.0, off - max(on, self._since)) for on, off in self._online[name])

    def _merged_s(self, merges: Sequence[Record]) -> Counter[PeerId]:
        """Time of the steps in the records, a step counting once in each fragment."""
        merged_s: Counter[PeerId] = Counter()
        for record in merges:
            for part in record.contributors:
                step_s = self.world.machines[part.peer].learner.step_s
                merged_s[part.peer] += part.steps * step_s / NUM_FRAGMENTS  # type: ignore[assignment]
        return merged_s

    def _fates(self) -> dict[str, float]:
        """What is pending with a machine that is off was lost with its session."""
        world = self.world
        fates: Counter[str] = Counter()
        for name, machine in world.machines.items():
            totals = world.checkers.totals(machine) if machine.node else self._totals.get(name)
            if totals:
                fates["merged"] += totals.merged
                fates["pending" if machine.node else "lost: its session ended"] += totals.pending
                for kind in ("rejected", "lost"):
                    for reason, tokens in getattr(totals, kind).items():
                        fates[f"{kind}: {reason}"] += tokens
        processed = sum(fates.values())
        return {fate: tokens / processed for fate, tokens in fates.most_common()}
