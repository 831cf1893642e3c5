"""Nodes that roll out and share steps, without processes: real dispatchers, desks and decisions,
over workers and learners that play a part, in virtual time.

The policy is a function: each trajectory has one true episode, and a worker gives it turn by turn.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

from p2pdiloco.errors import PeerError
from p2pdiloco.learn.text import ByteTokenizer
from p2pdiloco.protocol.dealing import Learner
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Rules
from p2pdiloco.protocol.turns import Held, Holding, Load, Step, TurnId
from p2pdiloco.rl.assignment import SHARED, StepTasks
from p2pdiloco.rl.checks import Rulebook, story
from p2pdiloco.rl.conversation import Limits, Policy
from p2pdiloco.rl.environments import Guess
from p2pdiloco.rl.episodes import Episode, pack, unpack
from p2pdiloco.rl.harvest import until
from p2pdiloco.rollout.request import Token
from p2pdiloco_daemon.exchange import Busy, Refused, Unreachable
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.crew import Crew, Heard
from p2pdiloco_daemon.rl.dispatcher import Dispatcher
from p2pdiloco_daemon.rl.share_desk import (
    DOUBTED,
    NotYet,
    ShareDesk,
    ShareDoubted,
    ShareRefused,
    pack_groups,
    unpack_share,
)
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy, TurnRefused

ANNA, BERT, CLEO = (PeerId(name) for name in ("anna", "bert", "cleo"))
NUM_GROUPS, GROUP_SIZE = 4, 3
NUM_TRAJECTORIES = NUM_GROUPS * GROUP_SIZE
INNER_STEPS = 4
LIMITS = Limits(turns_max=4, answer_tokens_max=1, tokens_max=96)
LATENCY_S = 0.05
SILENCE_S = 4.0
"""Until the others notice that a node is dead."""
LEARN_S = 2.0


def rulebook(step: int) -> Rulebook:
    return Rulebook(
        tasks=StepTasks("run", step, SHARED, NUM_GROUPS, GROUP_SIZE),
        task=Guess(),
        tokenizer=ByteTokenizer(),
        policy=Policy(stop_token=ord("\n")),
        limits=LIMITS,
        versions=frozenset({step}),
    )


def step_of(number: int) -> Step:
    rules = rulebook(number)
    prompts = [len(rules.conversation(g * GROUP_SIZE).tokens) for g in range(NUM_GROUPS)]
    return Step(number=number, prompt_tokens=tuple(prompts), group_size=GROUP_SIZE)


def episode_of(step: int, trajectory: int, salt: str = "") -> Episode:
    """The true one; with a salt, one of another policy."""
    conversation = rulebook(step).conversation(trajectory)
    while conversation.episode is None:
        text = f"{salt}/{step}/{trajectory}/{conversation.turn}"
        digit = blake2b(text.encode(), digest_size=1).digest()[0] % 10
        conversation.answered([Token(ord("0") + digit, -1.0, step)])
    return conversation.episode


def refusal_of(step: int, data: bytes, *, replay: bool, ended: bool) -> str | None:
    episode = unpack(data)
    if ended and (refusal := story(episode, rulebook(step))):
        return str(refusal)
    if replay:
        truth = episode_of(step, episode.trajectory)
        if truth.tokens[: len(episode.tokens)] != episode.tokens:
            return "the policy would not have chosen one of its tokens"
    return None


@dataclass
class Worker:
    """`manner` is "honest" or how it fails; `turn_s` and `check_s` what turns and checks take."""

    manner: str = "honest"
    turn_s: float = 1.0
    check_s: float = 0.01
    is_up: bool = True
    version: int = 0
    num_unsent: int = 0
    kept: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """By trajectory of the present step: turns that it holds, and whether that is the end."""
    handed: set[int] = field(default_factory=set)
    """Of those, what a liar handed it to go on from."""
    played: Counter[TurnId] = field(default_factory=Counter)
    num_running: int = 0
    num_running_max: int = 0

    def install(self, version: int) -> None:
        self.version = version
        self.kept.clear()
        self.handed.clear()

    def load(self) -> Load | None:
        if not self.is_up:
            return None
        held = tuple(self._held(trajectory) for trajectory in sorted(self.kept))
        if self.manner == "claims ends":
            held = tuple(replace(of, holding=Holding.ENDED, turn=_before(of)) for of in held)
        return Load(
            num_rows=4,
            cache_tokens=1 << 16,
            prefill_tokens_per_s=1e4,
            token_s=((1, self.turn_s),),
            held=held,
        )

    async def play(self, turn: TurnId, history: bytes, *, dispatched: bool = True) -> Played:
        if not self.is_up:
            raise RolloutsBusy("the rollout worker is starting")
        if turn.step != self.version:
            raise TurnRefused(f"step {turn.step}; this worker has policy {self.version}")
        num_known = len(unpack(history).answers) if history else 0
        if not history and turn.turn and self.kept.get(turn.trajectory) != (turn.turn, False):
            raise TurnRefused("the history is missing")
        assert num_known in (0, turn.turn)
        if turn.turn:
            self.kept[turn.trajectory] = (turn.turn, False)
        self.num_running += 1
        self.num_running_max = max(self.num_running_max, self.num_running)
        try:
            await asyncio.sleep(math.inf if self.manner == "silent" else self.turn_s)
        finally:
            self.num_running -= 1
        if not self.is_up:
            raise RolloutsBusy("the rollout worker died")
        self.played[turn] += 1
        if (history and not _is_forged(history)) or not turn.turn:
            self.handed.discard(turn.trajectory)
        elif history:
            self.handed.add(turn.trajectory)
        played = self._given(turn.trajectory, turn.turn + 1)
        self.kept[turn.trajectory] = (turn.turn + 1, played.holding is Holding.ENDED)
        return played

    def held(self, step: int, trajectory: int) -> Played | None:
        if not self.is_up or step != self.version or trajectory not in self.kept:
            return None
        return self._given(trajectory, self.kept[trajectory][0])

    async def check(
        self,
        step: int,
        episodes: Sequence[bytes],
        replayed: Collection[int],
        *,
        ended: bool = True,
    ) -> list[str | None]:
        await asyncio.sleep(self.check_s)
        if not self.is_up or step > self.version:
            raise RolloutsBusy("the rollout worker is starting")
        if self.manner == "doubts" and replayed:
            return ["the policy would not have chosen one of its tokens"] * len(episodes)
        return [
            refusal_of(step, data, replay=i in replayed, ended=ended)
            for i, data in enumerate(episodes)
        ]

    def _given(self, trajectory: int, num_turns: int) -> Played:
        is_forged = self.manner == "other tokens" or trajectory in self.handed
        whole = episode_of(self.version, trajectory, "forged" if is_forged else "")
        num_turns = min(num_turns, len(whole.answers))
        is_ended = num_turns == len(whole.answers)
        episode = until(whole, num_turns)
        if self.manner == "invented reward":
            episode, is_ended = replace(episode, reward=0.875), True
        data = b"rubbish" if self.manner == "rubbish" else pack(episode)
        holding = Holding.ENDED if is_ended else Holding.READY
        turn = TurnId(self.version, trajectory, num_turns - is_ended)
        return Played(Held(turn, holding, len(episode.tokens)), 0, data)

    def _held(self, trajectory: int) -> Held:
        return self._given(trajectory, self.kept[trajectory][0]).held


def _is_forged(data: bytes) -> bool:
    episode = unpack(data)
    truth = episode_of(episode.answers[0].versions[0], episode.trajectory)
    return truth.tokens[: len(episode.tokens)] != episode.tokens


def _before(held: Held) -> TurnId:
    """The last turn that is behind what is held."""
    turn = held.turn
    return turn if held.holding is Holding.ENDED else replace(turn, turn=turn.turn - 1)


class Node:
    """`world` says what it sees of the others."""

    def __init__(self, name: PeerId, world: "World", life: int) -> None:
        self.me = name
        self.world = world
        self.life = life
        self.version = world.version
        self.head: str | None = "ours"
        self.worker = Worker(version=world.version)
        self.learnt: list[tuple[int, tuple[int, ...]]] = []
        """(step, trajectories) of each share that its learner got."""
        self.steps = 0
        self.blamed: list[tuple[PeerId, str]] = []
        self.notes: list[str] = []
        self._learning: set[asyncio.Task[None]] = set()
        checker = Checker(
            own=lambda: self.worker,
            rulebook_of=rulebook,
            replayed_share=world.replayed_shares.get(name, world.replayed_share),
            rng=random.Random(name),
        )
        self.desk = ShareDesk(
            self,
            GROUP_SIZE,
            checker,
            lambda: self,
        )
        self.dispatcher_ = Dispatcher(
            self,
            Crew(name, lambda: self.worker, world.peers_of(name)),
            self.desk,
            world.peers_of(name),
            step_of,
            Rules(turns_max=LIMITS.turns_max, tokens_max=LIMITS.tokens_max),
            INNER_STEPS,
            checker,
        )

    @property
    def dispatcher(self) -> PeerId | None:
        return self.world.dispatcher_seen_by(self.me)

    def may_dispatch(self, peer: PeerId) -> bool:
        return peer == self.dispatcher

    def workers(self) -> list[PeerId]:
        return self.world.seen()

    def learners(self) -> Mapping[PeerId, Learner]:
        return {
            peer: Learner(node.life, node.steps, node.steps > 0 or node.version > 0)
            for peer in self.world.seen()
            if (node := self.world.nodes[peer])
        }

    def blame(self, peer: PeerId, reason: str) -> None:
        self.blamed.append((peer, reason))

    def heard(self, peer: PeerId) -> None:
        self.dispatcher_.heard(peer)

    def pass_over(self, reason: str) -> None:
        self.world.passed_over.append(self.me)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def learn(self, step: int, episodes: Sequence[bytes]) -> bool:
        trajectories = tuple(unpack(data).trajectory for data in episodes)
        self.learnt.append((step, trajectories))
        learning = asyncio.create_task(self._learn(step))
        self._learning.add(learning)
        learning.add_done_callback(self._learning.discard)
        return True

    async def _learn(self, step: int) -> None:
        await asyncio.sleep(LEARN_S)
        if step == self.version:
            self.steps += INNER_STEPS

    def stop(self) -> None:
        for learning in self._learning:
            learning.cancel()


class Reached(Protocol):
    """Of a node, what others ask."""

    worker: Worker
    desk: ShareDesk

    def blame(self, peer: PeerId, reason: str) -> None: ...
    def heard(self, peer: PeerId) -> None: ...


class Around(Protocol):
    """Who is there, and who is deaf."""

    @property
    def nodes(self) -> Mapping[PeerId, Reached]: ...
    @property
    def dead(self) -> Collection[PeerId]: ...
    @property
    def deaf(self) -> Collection[PeerId]: ...


class Peers:
    """What one node can ask the others."""

    def __init__(self, me: PeerId, world: Around) -> None:
        self._me = me
        self._world = world

    async def _reach(self, peer: str) -> Reached:
        await asyncio.sleep(LATENCY_S)
        name = PeerId(peer)
        if name in self._world.dead or name not in self._world.nodes:
            raise Unreachable(f"{peer} is not there")
        if name in self._world.deaf:
            await asyncio.sleep(60)
            raise Unreachable(f"{peer} is silent")
        node = self._world.nodes[name]
        node.heard(self._me)
        return node

    async def load(self, peer: str) -> Heard:
        worker = (await self._reach(peer)).worker
        load = worker.load()
        if load is None:
            raise Busy(peer, 503, "no worker")
        return Heard(worker.version, load, LATENCY_S)

    async def play(self, peer: str, turn: TurnId, history: bytes) -> Played:
        node = await self._reach(peer)
        played = await node.worker.play(turn, history)
        if node is not self._world.nodes[PeerId(peer)] or peer in self._world.dead:
            raise Unreachable(f"{peer} broke off")
        return played

    async def held(self, peer: str, step: int, trajectory: int) -> Played:
        held = (await self._reach(peer)).worker.held(step, trajectory)
        if held is None:
            raise Refused(peer, 404, "not held")
        return held

    async def hand(self, peer: str, path: str, body: bytes) -> None:
        node = await self._reach(peer)
        step = int(path.split("/")[-1])
        try:
            await node.desk.take(self._me, step, unpack_share(body))
        except NotYet as error:
            raise Busy(peer, 503, str(error)) from error
        except ShareDoubted as error:
            raise Refused(peer, DOUBTED, str(error)) from error
        except ShareRefused as error:
            raise Refused(peer, 409, str(error)) from error
        except PeerError as error:
            node.blame(self._me, str(error))
            raise Refused(peer, 409, str(error)) from error

    async def get(self, peer: str, path: str, max_bytes: int) -> bytearray:
        node = await self._reach(peer)
        groups = node.desk.groups(int(path.split("/")[-1]))
        if groups is None:
            raise Refused(peer, 404, "no share was taken here")
        return bytearray(pack_groups(groups))


@dataclass
class World:
    """Merges as soon as the median living learner has done its steps."""

    names: tuple[PeerId, ...] = (ANNA, BERT, CLEO)
    replayed_share: float = 0.0
    replayed_shares: dict[PeerId, float] = field(default_factory=dict)
    """Of those nodes that look at more, or less."""
    version: int = 0
    dead: dict[PeerId, float] = field(default_factory=dict)
    """Since when."""
    deaf: set[PeerId] = field(default_factory=set)
    nodes: dict[PeerId, Node] = field(default_factory=dict)
    claims: dict[PeerId, PeerId] = field(default_factory=dict)
    """Who dispatches in the view of some nodes, where it is not the usual."""
    running: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)
    merged_at: list[float] = field(default_factory=list)
    passed_over: list[PeerId] = field(default_factory=list)
    """Who has no more patience with the dispatcher."""
    _lives: Counter[PeerId] = field(default_factory=Counter)

    def peers_of(self, name: PeerId) -> Peers:
        return Peers(name, self)

    def seen(self) -> list[PeerId]:
        now = asyncio.get_running_loop().time()
        return [n for n in self.nodes if n not in self.dead or now < self.dead[n] + SILENCE_S]

    def dispatcher_seen_by(self, name: PeerId) -> PeerId:
        seen = self.seen()
        return self.claims.get(name, seen[self.version % len(seen)])

    def start(self, name: PeerId) -> Node:
        self._lives[name] += 1
        self.dead.pop(name, None)
        node = self.nodes[name] = Node(name, self, self._lives[name])
        self.running[name] = asyncio.create_task(node.dispatcher_.run(), name=name)
        return node

    def kill(self, name: PeerId) -> None:
        self.dead[name] = asyncio.get_running_loop().time()
        self.nodes[name].worker.is_up = False
        self.nodes[name].stop()
        self.running[name].cancel()

    async def merging(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            steps = sorted(n.steps for name, n in self.nodes.items() if name not in self.dead)
            if steps and steps[len(steps) // 2] >= INNER_STEPS:
                self.version += 1
                self.merged_at.append(asyncio.get_running_loop().time())
                for node in self.nodes.values():
                    node.version, node.steps = self.version, 0
                    node.worker.install(self.version)

    async def until_version(self, version: int, timeout_s: float = 600.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.version < version:
                for running in self.running.values():
                    if running.done() and not running.cancelled():
                        running.result()
                await asyncio.sleep(0.1)

    async def until_all_have_shares(self) -> None:
        async with asyncio.timeout(60):
            while not all(node.learnt for node in self.nodes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def learnt(self, step: int) -> list[int]:
        """Trajectories of that step that reached a learner, of each life."""
        return sorted(
            trajectory
            for node in self.nodes.values()
            for of, trajectories in node.learnt
            if of == step
            for trajectory in trajectories
        )

    def turns_played(self, step: int) -> Counter[TurnId]:
        played: Counter[TurnId] = Counter()
        for node in self.nodes.values():
            played += Counter({t: n for t, n in node.worker.played.items() if t.step == step})
        return played


@asynccontextmanager
async def swarm(world: World) -> AsyncIterator[World]:
    for name in world.names:
        world.start(name)
    merging = asyncio.create_task(world.merging())
    try:
        yield world
    finally:
        tasks = [merging, *world.running.values()]
        for task in tasks:
            task.cancel()
        for node in world.nodes.values():
            node.stop()
        await asyncio.wait(tasks)
