"""What must hold while a swarm of real processes suffers, read from status pages and logs.

The promises themselves are those of the simulator (`p2pdiloco.simulation.promises`); here is how
real nodes are looked at. Some hold at every look (equal records mean equal states, ledgers add up,
no learner waits, nobody logs a traceback), some must hold again soon after the last fault.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.chaos_swarm import Broken, ChaosSwarm, Node, together
from p2pdiloco.protocol.ledger import Totals
from p2pdiloco.simulation import promises
from p2pdiloco.simulation.promises import FragmentSight, Sight
from p2pdiloco_daemon.status.view import JsonObject

LOOK_EVERY_S = 0.25

WAITING_S_MAX = 3.0
WAITING_SHARE_MAX = 0.1
"""What of a learner's time may be missing from what it accounts for: its messages are late on a
busy machine. One that waited for peers would wait at each merge, and for a dead one the seconds
that it takes to suspect it."""

WINDOW_S = 20.0
"""A step counts when it is done, so what seems to be waiting may be a long step; what seemed to be
less at some look of so many seconds was less."""

SPAN_S = 120.0
"""Waiting is counted anew from time to time, so that a share of all times is not saved up."""

SIGNS_OF_A_BUG = ("Traceback (most recent call last)", "was never retrieved", "Unclosed")

Promise = str | None
"""What is broken, if it is."""


@dataclass(frozen=True, slots=True)
class Look:
    """A node's status, and when it was read."""

    at: float
    status: JsonObject
    life: int
    disturbances: int

    @property
    def learner_life(self) -> tuple[int, int]:
        return self.life, self.status["learner"]["restarts"]

    @property
    def may_step(self) -> bool:
        """Whether nothing that was done to the learner keeps it from stepping."""
        return self.status["learner"]["state"] == "training" and self.disturbances % 2 == 0

    def is_of_one_piece_with(self, earlier: "Look") -> bool:
        """Whether nothing was done to the learner in between."""
        return (self.learner_life, self.disturbances) == (
            earlier.learner_life,
            earlier.disturbances,
        )

    @property
    def accounted_s(self) -> float:
        """Of the learner's time, in steps, between them and in evaluations."""
        learner = self.status["learner"]
        return sum(float(learner[f"{what}_s"]) for what in ("compute", "stall", "evaluation"))


class Watch:
    """Looks at all nodes, again and again."""

    def __init__(self, swarm: ChaosSwarm) -> None:
        self.swarm = swarm
        self.looks: dict[str, Look] = {}
        """The newest of each node that answered."""
        self.merges: dict[tuple[int, int, str], float] = {}
        """(fragment, version, synchronizer) of merged rounds -> when they were first seen."""
        self.contributed: dict[str, float] = {}
        """Peer -> when it was last seen among the contributors of a new merge."""
        self._states: dict[tuple[int, str], str] = {}
        self._first: dict[str, Look] = {}
        self._waits: dict[str, deque[tuple[float, float]]] = {}
        """(when, seconds without a step since the first look), of the last `WINDOW_S`."""
        self._read: dict[str, int] = {}

    async def look(self) -> Mapping[str, Look]:
        """What the nodes say now; those that do not answer are left out. Broken if a promise is."""
        looks: dict[str, Look] = {}

        async def look_at(node: Node) -> None:
            if look := await self._look(node):
                looks[node.name] = look

        nodes = self.swarm.nodes.values()
        await together(look_at(node) for node in nodes)
        for node in nodes:
            self._read_log(node)
        return looks

    async def keep_looking(self) -> None:
        """Until it is cancelled, or something is broken."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, node: Node) -> Look | None:
        life, disturbances, at = node.lives, node.disturbances, time.monotonic()
        status = await node.status()
        if status is None or life != node.lives or not status["fragments"]:
            return None
        look = Look(at, status, life, disturbances)
        await self._require(node, look)
        self._note_merges(look)
        self.looks[node.name] = look
        return look

    async def _require(self, node: Node, look: Look) -> None:
        seen, before = sight(node.name, look), self.looks.get(node.name)
        broken = promises.ledger_adds_up(seen)
        if before:
            broken = broken or promises.no_token_vanishes(sight(node.name, before), seen)
        broken = broken or self._waited(node, look) or await self._other_state(node, seen)
        if broken:
            raise Broken(f"{node.name}: {broken}")

    async def _other_state(self, node: Node, seen: Sight) -> Promise:
        """A page may show a state and a record that are just about to change; so look twice."""
        broken = promises.identical_states(self._states, seen)
        if broken and (status := await node.status()):
            again = sight(node.name, Look(time.monotonic(), status, node.lives, 0))
            return promises.identical_states(self._states, again)
        return None

    def _waited(self, node: Node, look: Look) -> Promise:
        """Since the learner, or the daemon that counts for it, began."""
        first = self._first.get(node.name)
        whole = first and look.is_of_one_piece_with(first) and look.at - first.at < SPAN_S
        if not look.may_step or first is None or not whole:
            self._first.pop(node.name, None)
            if look.may_step:
                self._first[node.name] = look
                self._waits[node.name] = deque()
            return None
        passed_s = look.at - first.at
        waits = self._waits[node.name]
        waits.append((look.at, passed_s - (look.accounted_s - first.accounted_s)))
        while waits[0][0] < look.at - WINDOW_S:
            waits.popleft()
        if passed_s < WINDOW_S:
            return None
        waited_s = min(waited for _, waited in waits)
        most_s = WAITING_S_MAX + WAITING_SHARE_MAX * passed_s
        return promises.at_most("seconds without a step", round(waited_s, 1), round(most_s, 1))

    def _note_merges(self, look: Look) -> None:
        for told in look.status["rounds"]:
            if told["outcome"] != "merged":
                continue
            at = look.at - float(told["seconds_ago"])
            key = (told["fragment"], told["version"], told["synchronizer"])
            self.merges[key] = min(at, self.merges.get(key, at))
            for peer in told["contributors"]:
                self.contributed[peer] = max(at, self.contributed.get(peer, at))

    def _read_log(self, node: Node) -> None:
        if not node.log.exists():
            return
        with node.log.open(errors="replace") as log:
            log.seek(self._read.get(node.name, 0))
            words = log.read()
            self._read[node.name] = log.tell()
        for sign in SIGNS_OF_A_BUG:
            if sign in words:
                raise Broken(f"{node.name} logs: {words[words.index(sign) :][:3000]}")

    # ---------------------------------------------------------------- what must come to hold again

    async def heals(self, since: Mapping[str, Look], within_s: float) -> float:
        """Seconds until all is well again; Broken with what is not, after `within_s`."""
        started = time.monotonic()
        while wrong := self._not_healed(since, await self.look()):
            if time.monotonic() - started > within_s:
                raise Broken(f"{within_s:.0f} s after the last fault: {wrong}")
            await asyncio.sleep(LOOK_EVERY_S)
        return time.monotonic() - started

    async def moves_on(self, since: Mapping[str, Look], within_s: float) -> float:
        """Seconds until every fragment was merged anew."""
        started = time.monotonic()
        before = [sight(name, look) for name, look in since.items()]
        while True:
            now = [sight(name, look) for name, look in (await self.look()).items()]
            wrong = promises.moved_on(before, now) if now else "no node answers"
            if not wrong or not before:
                return time.monotonic() - started
            if time.monotonic() - started > within_s:
                raise Broken(f"{within_s:.0f} s after the last fault: {wrong}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _not_healed(self, since: Mapping[str, Look], looks: Mapping[str, Look]) -> Promise:
        names = list(self.swarm.nodes)
        if silent := [name for name in names if name not in looks]:
            return f"{silent} do not answer"
        for name, look in looks.items():
            if idle := _not_training(look.status, len(names)):
                return f"{name}: {idle}"
        sights = [sight(name, look) for name, look in looks.items()]
        before = [sight(name, look) for name, look in since.items()]
        moved = promises.moved_on(before, sights) if before else None
        return promises.one_lineage(sights) or moved

    async def settles(self, within_s: float) -> list[Sight]:
        """Has everybody stop training; Broken unless all end on the same records in time."""
        deadline = time.monotonic() + within_s
        while True:
            await together(node.settle() for node in self.swarm.nodes.values())
            looks = await self.look()
            sights = [sight(name, look) for name, look in looks.items()]
            silent = len(looks) < len(self.swarm.nodes)
            wrong = "not all answer" if silent else promises.one_head(sights)
            if not wrong:
                return sights
            if time.monotonic() > deadline:
                raise Broken(f"{within_s:.0f} s after they were asked to settle: {wrong}")
            await asyncio.sleep(LOOK_EVERY_S)


def sight(name: str, look: Look) -> Sight:
    """What the promises want to know of a node."""
    tokens = look.status["tokens"]
    return Sight(
        name=name,
        at=look.at,
        life=look.life,
        fragments=tuple(_fragment(told) for told in look.status["fragments"]),
        tokens=Totals(
            tokens["processed"],
            tokens["merged"],
            tokens["pending"],
            tokens["rejected"],
            tokens["lost"],
        ),
        settled=look.status["state"] == "settled",
        steps=look.status["learner"]["step"],
    )


def _fragment(told: JsonObject) -> FragmentSight | None:
    if told["version"] < 0:
        return None
    head = told["record_digest"] or f"genesis of {told['index']}"
    return FragmentSight(told["version"], head, told["digest"], told["merged_tokens"])


def _not_training(status: JsonObject, num_nodes: int) -> Promise:
    """Why a node does not take part as it should."""
    ready = sum(member["ready"] and member["alive"] for member in status["members"])
    if status["state"] != "training" or status["learner"]["state"] != "training":
        return f"it is {status['state']}, its learner {status['learner']['state']}"
    if ready != num_nodes:
        return f"it sees {ready} of {num_nodes} nodes ready"
    return str(status["checkpoint"]["error"]) if status["checkpoint"]["error"] else None
