"""The processes of `benchmarks.pacing`: a server, a learner, a node that syncs, and the others.

    home   serve   an HTTP server that answers by real torch inference, one request after the other
           learn   inner steps of the tiny model for ever
           node    decides when to sync, encodes, uploads, downloads, applies; deals windows out
    away   load    requests at random moments at the rate that a schedule names; the peer of syncs

`benchmarks.pacing` starts them, home and away in network namespaces with a shaped link between
them. All read the same clock (`time.monotonic`), and each writes what it saw to a file of its own.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from p2pdiloco.protocol.calibration import Answer
from p2pdiloco.protocol.pacer import Pacer, Served
from p2pdiloco.protocol.pacing import SyncTimes, next_offset, window
from p2pdiloco.protocol.policies import (
    Calibrated,
    Fixed,
    Moment,
    Policy,
    Pressure,
    PressureGate,
    RandomMoment,
    WorkloadAware,
)

SERVE_PORT, NODE_PORT, PEER_PORT = 8101, 8102, 8103
PROMPT_TOKENS, ANSWER_TOKENS = 48, 6
NUM_VALUES = 4_000_000
"""Values of a sync: as int8 some 3.5 MB."""
STEPS_PER_PERIOD = 80
SLACK_STEPS = 60
QUIET_RATE, BURST_RATE = 1.5, 6.0
"""Requests per second."""


# -------------------------------------------------------------------- what the load will be


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests per second over time, known in advance to the oracle alone."""

    kind: str
    seed: int
    length_s: float
    bursts: tuple[tuple[float, float], ...] = ()

    @classmethod
    def drawn(cls, kind: str, seed: int, length_s: float) -> "Schedule":
        """`bursty`: spells of 4 to 9 s, quiet for 6 to 18 s; `wave`: a sine of 40 s."""
        rng, at, bursts = random.Random(seed), 0.0, []
        while at < length_s:
            at += rng.uniform(6, 18)
            end = at + rng.uniform(4, 9)
            bursts.append((at, end))
            at = end
        return cls(kind, seed, length_s, tuple(bursts))

    def rate(self, t: float) -> float:
        if self.kind == "wave":
            share = (1 + np.sin(2 * np.pi * t / 40 + self.seed)) / 2
            return float(QUIET_RATE + (BURST_RATE - QUIET_RATE) * share)
        busy = any(start <= t < end for start, end in self.bursts)
        return BURST_RATE if busy else QUIET_RATE

    def requests_between(self, start: float, end: float) -> float:
        """As many are expected."""
        return sum(self.rate(start + 0.1 * n) for n in range(round((end - start) / 0.1))) * 0.1


@dataclass
class Oracle:
    """Knows the schedule: syncs at the moment of its window that meets the fewest requests."""

    schedule: Schedule
    elapsed_s: Callable[[], float]
    duration_s: Callable[[], float]
    _planned: dict[int, float] = field(default_factory=dict)

    def judge(self, moment: Moment) -> tuple[bool, str]:
        now = self.elapsed_s()
        if moment.version not in self._planned:
            starts = np.arange(now, now + max(moment.left_s, 0.3), 0.25)
            met = [self.schedule.requests_between(s, s + self.duration_s()) for s in starts]
            self._planned[moment.version] = float(starts[int(np.argmin(met))])
        return now >= self._planned[moment.version], "the schedule says so"


POLICIES = ("fixed", "random", "gate", "workload", "calibrated", "oracle")


async def epoch_of(out: Path) -> float:
    """When time begins: `benchmarks.pacing` writes it down once all are ready."""
    path = out.with_name("epoch")
    while not path.exists():  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(0.1)
    return float(path.read_text())


# -------------------------------------------------------------------- home


async def serve(out: Path, home: str) -> None:
    import torch

    from p2pdiloco.learn.models import build_model
    from p2pdiloco.spec import ModelSpec

    torch.set_num_threads(1)
    model = build_model(ModelSpec(preset="tiny"), 0, 128).eval()
    rng = np.random.default_rng(0)
    thread = ThreadPoolExecutor(1)
    waiting = 0

    def infer() -> float:
        started = time.monotonic()
        tokens = torch.from_numpy(rng.integers(0, 256, (1, PROMPT_TOKENS)))
        with torch.inference_mode():
            for _ in range(ANSWER_TOKENS):
                best = model(tokens).logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, best], 1)
        return time.monotonic() - started

    async def answer(_request: web.Request) -> web.Response:
        nonlocal waiting
        came, load = time.monotonic(), waiting
        waiting += 1
        try:
            service_s = await asyncio.get_running_loop().run_in_executor(thread, infer)
        finally:
            waiting -= 1
        return web.json_response([service_s, time.monotonic() - came, load])

    app = web.Application()
    app.router.add_post("/answer", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, home, SERVE_PORT).start()
    infer()
    out.with_suffix(".ready").touch()
    await asyncio.Event().wait()


def learn() -> None:
    """A line for each inner step."""
    import torch

    from p2pdiloco.learn.inner_loop import InnerLoop
    from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
    from p2pdiloco.learn.text import TextStream, open_text
    from p2pdiloco.optim.fragments import plan_fragments
    from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec

    torch.set_num_threads(1)
    data = DataSpec()
    model = build_model(ModelSpec(preset="tiny"), 0, data.sequence_length)
    text = open_text(data)
    stream = TextStream(text, data.sequence_length, 0, "pacing")
    fragments = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
    loop = InnerLoop(model, stream, InnerSpec(), fragments)
    while True:
        result = loop.step()
        print(time.monotonic(), result.loss, result.tokens, flush=True)


class Node:
    """Deals windows out to the policies, in blocks of all of them in random order."""

    def __init__(self, args: argparse.Namespace) -> None:
        from p2pdiloco.optim.fragments import plan_fragments
        from p2pdiloco_daemon.storage.replica import Replica, genesis

        self.args = args
        self.times = SyncTimes(
            inner_steps=STEPS_PER_PERIOD,
            num_fragments=1,
            overlap_steps=2,
            quorum=1,
            grace_factor=0.8,
            slack_steps=SLACK_STEPS,
        )
        self.schedule = Schedule.drawn(args.kind, args.seed, args.seconds)
        self.pacer = Pacer(Fixed())
        self.calibrated = Calibrated()
        self.syncs: list[dict[str, Any]] = []
        self.steps_at: deque[float] = deque(maxlen=50)
        self.num_steps = self.received_at_step = 0
        self.learns = asyncio.Event()
        self.offset = 0
        self.loss, self.loss_then = 0.0, 0.0
        self.syncing_since: float | None = None
        self.intervals: deque[tuple[float, float]] = deque(maxlen=20)
        self.worker = ThreadPoolExecutor(1)
        fragments = plan_fragments({"w": (NUM_VALUES,)}, 1, set())
        self.replica = Replica(
            fragments, outer_learning_rate=0.5, outer_momentum=0.3, wire="int8", merge_rule="rda"
        )
        rng = np.random.default_rng(args.seed)
        self.noise = rng.normal(0, 1e-3, NUM_VALUES).astype(np.float32)
        self.replica.put(genesis(0, rng.normal(0, 0.05, NUM_VALUES).astype(np.float32)))
        self.payload = b""
        self.rng = random.Random(args.seed)
        self.block: list[str] = []
        self.random = RandomMoment(random.Random(args.seed + 1))
        self.oracle = Oracle(self.schedule, self.elapsed_s, self.usual_duration_s)

    def elapsed_s(self) -> float:
        return time.monotonic() - float(self.args.epoch)

    def usual_duration_s(self) -> float:
        done = [s["end"] - s["start"] for s in self.syncs[-10:]]
        return float(np.median(done)) if done else 2.5

    def next_policy(self) -> tuple[str, Policy]:
        """All of them in each block; `random` alone while calibrating."""
        if not self.block:
            self.block = ["random"] if self.args.calibrate else list(POLICIES)
            self.rng.shuffle(self.block)
        name = self.block.pop()
        named: dict[str, Policy] = {
            "fixed": Fixed(),
            "random": self.random,
            "gate": PressureGate(),
            "workload": WorkloadAware(),
            "calibrated": self.calibrated,
            "oracle": self.oracle,
        }
        return name, named[name]

    def take_served(self, told: dict[str, Any]) -> None:
        now = time.monotonic()
        for done, latency_s, load in told["answers"]:
            began = done - latency_s
            spans = [*self.intervals]
            if self.syncing_since is not None:
                spans.append((self.syncing_since, now))
            syncing = any(start < done and began < end for start, end in spans)
            self.pacer.model.add(Answer(latency_s, load, syncing))
        rate = told["load"]
        link = 1.0 if self.syncing_since is not None else 0.0
        busy = min(1.0, rate / BURST_RATE)
        self.pacer.measured(
            Pressure(link=link, serving=busy), Served(told["target_s"], told["load"], rate)
        )
        if forecast := self.pacer.forecast:
            self.calibrated.history.add(forecast.cost)

    async def follow_learner(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __spec__.name, "learn", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout
        try:
            while line := await process.stdout.readline():
                at, loss, _ = line.split()
                self.num_steps += 1
                self.learns.set()
                self.steps_at.append(float(at))
                self.loss = 0.9 * (self.loss or float(loss)) + 0.1 * float(loss)
        finally:
            with suppress(ProcessLookupError):
                process.kill()

    def step_s(self) -> float:
        if len(self.steps_at) < 2:
            return 0.1
        return (self.steps_at[-1] - self.steps_at[0]) / (len(self.steps_at) - 1)

    def moment(self, version: int) -> Moment:
        steps = self.num_steps - self.received_at_step
        opens, closes = window(self.times, 0, max(1, version), self.offset)
        return Moment(
            fragment=0,
            version=version,
            steps=steps,
            tokens=steps * 512,
            opens=opens,
            closes=closes,
            step_s=self.step_s(),
            staleness_s=steps * self.step_s(),
            loss_fall=max(0.0, self.loss_then - self.loss),
            pressure=self.pacer.pressure,
            forecast=self.pacer.forecast,
        )

    async def decide_for_ever(self, session: aiohttp.ClientSession) -> None:
        version, self.received_at_step = 1, self.num_steps
        while True:
            name, self.pacer.policy = self.next_policy()
            while True:
                await asyncio.sleep(0.2)
                moment = self.moment(version)
                if self.num_steps and self.pacer.decide(moment).sync:
                    break
            await self.sync(session, name, moment, version)
            self.offset = next_offset(self.times, 0, version + 1, self.offset, moment.steps)
            self.received_at_step, self.loss_then = self.num_steps, self.loss
            self.received_at_step -= round(
                (time.monotonic() - self.syncs[-1]["start"]) / moment.step_s
            )
            version += 1

    async def sync(
        self, session: aiohttp.ClientSession, name: str, moment: Moment, version: int
    ) -> None:
        loop, start = asyncio.get_running_loop(), time.monotonic()
        reason = self.pacer.decisions[0].reason
        self.syncing_since = start
        state = self.replica.state(0)
        assert state
        local = state.anchor + self.noise
        self.payload = await loop.run_in_executor(
            self.worker, self.replica.encode_outer_gradient, 0, state.version, local
        )
        peer = f"http://{self.args.away}:{PEER_PORT}"
        async with session.post(f"{peer}/pull") as response:
            response.raise_for_status()
        async with session.get(f"{peer}/merge") as response:
            payload = await response.read()
        state = await loop.run_in_executor(
            self.worker, self.replica.apply, 0, state.version + 1, payload
        )
        self.replica.put(state)
        end = time.monotonic()
        self.syncing_since = None
        self.intervals.append((start, end))
        self.syncs.append(
            {"policy": name, "start": start, "end": end, "steps": moment.steps,
             "opens": moment.opens, "closes": moment.closes, "reason": reason,
             "at_step": self.num_steps, "bytes": len(self.payload)}
        )  # fmt: skip


async def node(args: argparse.Namespace) -> None:
    from p2pdiloco_bootstrap.serving import Traffic, send_body

    it, traffic = Node(args), Traffic()

    async def served(request: web.Request) -> web.Response:
        it.take_served(await request.json())
        return web.Response(status=204)

    async def contribution(request: web.Request) -> web.StreamResponse:
        return await send_body(request, it.payload, "contribution", traffic)

    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/served", served)
    app.router.add_get("/contribution", contribution)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, args.home, NODE_PORT).start()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        learner = tasks.create_task(it.follow_learner())
        await it.learns.wait()
        args.out.with_suffix(".ready").touch()
        args.epoch = await epoch_of(args.out)
        with suppress(TimeoutError):
            async with asyncio.timeout(args.epoch + args.seconds - time.monotonic()):
                await it.decide_for_ever(session)
        learner.cancel()
    coverage = {str(k): v.share for k, v in it.pacer.model.coverage.items()}
    args.out.write_text(
        json.dumps(
            {
                "syncs": it.syncs,
                "steps": it.num_steps,
                "coverage": coverage,
                "relearned": it.pacer.model.relearned,
            }
        )
    )


# -------------------------------------------------------------------- away


async def load(args: argparse.Namespace) -> None:
    schedule, rng = Schedule.drawn(args.kind, args.seed, args.seconds), random.Random(args.seed)
    results: list[Sequence[float]] = []
    came: deque[float] = deque()
    untold: list[tuple[float, float, float]] = []
    asking: set[asyncio.Task[None]] = set()
    payload = b""

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def pull(_request: web.Request) -> web.Response:
            nonlocal payload
            async with session.get(f"http://{args.home}:{NODE_PORT}/contribution") as response:
                payload = await response.read()
            return web.Response(status=204)

        async def merge(_request: web.Request) -> web.Response:
            return web.Response(body=payload)

        def rate() -> float:
            """Requests per second over the last three."""
            while came and came[0] < time.monotonic() - 3:
                came.popleft()
            return len(came) / 3

        async def ask() -> None:
            sent = time.monotonic()
            came.append(sent)
            load = rate()
            async with session.post(f"http://{args.home}:{SERVE_PORT}/answer") as response:
                service_s, latency_s, _ = await response.json()
            done = time.monotonic()
            results.append((sent, done - sent, service_s, latency_s, load))
            untold.append((done, done - sent, load))

        async def tell() -> None:
            """What clients saw: a server alone does not notice that its answers wait for the
            link.
            """
            while True:
                await asyncio.sleep(0.5)
                told = {"load": rate(), "target_s": args.target, "answers": untold[:]}
                untold.clear()
                await session.post(f"http://{args.home}:{NODE_PORT}/served", json=told)

        app = web.Application()
        app.router.add_post("/pull", pull)
        app.router.add_get("/merge", merge)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, args.away, PEER_PORT).start()
        args.out.with_suffix(".ready").touch()
        args.epoch = await epoch_of(args.out)
        await asyncio.sleep(args.epoch - time.monotonic())
        telling = asyncio.create_task(tell())
        while (t := time.monotonic() - args.epoch) < args.seconds - 3:
            # thinning: a Poisson process of the schedule's rate
            await asyncio.sleep(rng.expovariate(BURST_RATE))
            if rng.random() < schedule.rate(t) / BURST_RATE:
                asking.add(asyncio.create_task(ask()))
        telling.cancel()
        await asyncio.wait(asking, timeout=15)
    args.out.write_text(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["serve", "learn", "node", "load"])
    for name in ("home", "away", "kind"):
        parser.add_argument(f"--{name}", default="")
    for name in ("seconds", "target"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("/dev/null"))
    args = parser.parse_args()
    match args.part:
        case "serve":
            asyncio.run(serve(args.out, args.home))
        case "learn":
            learn()
        case "node":
            asyncio.run(node(args))
        case "load":
            asyncio.run(load(args))


if __name__ == "__main__":
    main()
