"""What shares this machine with the node, measured once a second for the core's pacer.

Other programs' use of the processors, the link, writes that wait for the disk, the learner's among
them, and what is served here: any program on this machine that answers requests may say so (`POST
/api/served`), and the node learns what its own transfers and merges do to those answers.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from p2pdiloco.errors import UserError
from p2pdiloco.protocol import events
from p2pdiloco.protocol.calibration import Answer
from p2pdiloco.protocol.pacer import Served
from p2pdiloco.protocol.policies import Pressure
from p2pdiloco.protocol.uplink import DELAY_S
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_daemon.node import NodeShell
from p2pdiloco_daemon.storage.holdings import Holdings

LOOK_S = 0.25
"""Between looks at whether bodies move or the worker computes."""
LOOKS = 4
"""In a second, after which the pacer is told."""
SPANS_KEPT = 240
"""A minute of looks: answers that are told of later count as undisturbed."""
SILENT_S = 10.0
"""Who serves here and tells nothing for so long has gone."""
ANSWERS_MAX = 1000
"""In one report; more than this a machine hardly answers in a second."""
_NOT_BODIES = ("message", "records", "spec")
"""Kinds of traffic that go on all the time."""

logger = logging.getLogger(__name__)

Duration = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Load = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class ServedAnswer(NamedTuple):
    """A request that was answered `seconds_ago`; `load` was what was asked of the server when it
    came, best in requests per second over some seconds.
    """

    seconds_ago: Duration
    latency_s: Duration
    load: Load


@dataclass(frozen=True, slots=True)
class ServedReport:
    """What a program that serves on this machine posts, about once a second: how long an answer
    should take at most, the load now, and the answers since its last report.
    """

    target_s: Duration
    load: Load
    answers: Annotated[tuple[ServedAnswer, ...], Field(max_length=ANSWERS_MAX)]


_REPORT = TypeAdapter(ServedReport)


class ServedLog:
    """Keeps what was reported until the pacer is told. `busy` is how many seconds of answers were
    given per second.

    Reports come about once a second, and the pacer is told as often, but not in step: a second
    without a report is as busy as the last one with one.
    """

    def __init__(self) -> None:
        self._target_s = self._load = 0.0
        self._answers: deque[tuple[float, ServedAnswer]] = deque(maxlen=ANSWERS_MAX)
        """(when it was answered, answer)"""
        self._heard_at: float | None = None
        self._reported = False
        self._passed_s = 0.0
        """Since the pacer was last told of a report."""
        self._rate = self.busy = 0.0

    def take(self, body: bytes) -> None:
        """A report in JSON; UserError for anything else."""
        try:
            report = _REPORT.validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "report"
            raise UserError(f"{where}: {first['msg']}") from error
        now = asyncio.get_running_loop().time()
        self._target_s, self._load, self._heard_at = report.target_s, report.load, now
        self._reported = True
        self._answers.extend((now - answer.seconds_ago, answer) for answer in report.answers)

    def since_last(self, now: float, spent_s: float, syncs: "SyncSpans") -> Served | None:
        """What was served in the last `spent_s`; None when nobody serves here."""
        if self._heard_at is None or now > self._heard_at + SILENT_S:
            self._answers.clear()
            self._passed_s = self._rate = self.busy = 0.0
            return None
        answers = tuple(
            Answer(a.latency_s, a.load, syncs.overlap(at - a.latency_s, at))
            for at, a in self._answers
        )
        self._answers.clear()
        self._passed_s += spent_s
        if self._reported:
            self._rate = len(answers) / self._passed_s
            self.busy = sum(answer.latency_s for answer in answers) / self._passed_s
            self._reported, self._passed_s = False, 0.0
        return Served(self._target_s, self._load, self._rate, answers)


class SyncSpans:
    """When a transfer or merge of this node was in flight, as far as regular looks tell."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS_KEPT)
        self._before: tuple[int, int] | None = None
        self._looked_at = 0.0

    def look(self, now: float, moved: int, computed: int, *, computing: bool) -> None:
        """`moved` bytes of bodies and `computed` jobs of the worker, in all so far."""
        seen = moved, computed
        if computing or (self._before is not None and seen != self._before):
            self._spans.append((self._looked_at, now))
        self._before, self._looked_at = seen, now

    def overlap(self, start: float, end: float) -> bool:
        return any(began < end and start < ended for began, ended in self._spans)


class Processors:
    """Share of this machine's processors that other programs use."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._before = self._read()

    def share_of_others(self) -> float:
        """Since the last call; 0 if the machine does not tell."""
        try:
            before, self._before = self._before, self._read()
        except OSError as error:  # no file can be opened
            logger.debug("the use of the processors is not known: %s", error)
            return 0.0
        total_s, idle_s, own_s = (b - a for a, b in zip(before, self._before, strict=True))
        if total_s <= 0:
            return 0.0
        return min(1.0, max(0.0, (total_s - idle_s - own_s) / total_s))

    def _read(self) -> tuple[float, float, float]:
        """Seconds of all processors: in all, idle, and used by this daemon and what it started, of
        that also what has ended."""
        times = psutil.cpu_times()
        own_s = 0.0
        for process in (self._own, *self._own.children(recursive=True)):
            try:
                used = process.cpu_times()
            except psutil.Error:  # it has just ended
                continue
            own_s += used.user + used.system + used.children_user + used.children_system
        return sum(times[:8]), times.idle + getattr(times, "iowait", 0.0), own_s


class Saves(Protocol):
    """Of a `p2pdiloco_daemon.report.LearnerReport`: whether the learner writes its checkpoint."""

    saving: bool


async def measure_machine(
    served: ServedLog, holdings: Holdings, shell: NodeShell, traffic: Traffic, learner: Saves
) -> None:
    """Tells the core, for ever."""
    loop, spans, processors = asyncio.get_running_loop(), SyncSpans(), Processors()
    told_at = loop.time()
    while True:
        saving = False
        for _ in range(LOOKS):
            await asyncio.sleep(LOOK_S)
            saving |= learner.saving or holdings.disk.is_waiting
            moved = _bodies(traffic)
            spans.look(loop.time(), moved, holdings.num_computed, computing=holdings.is_computing)
        now = loop.time()
        answers = served.since_last(now, now - told_at, spans)
        owner = await asyncio.to_thread(processors.share_of_others)  # it looks at all processes
        pressure = Pressure(
            link=_link(traffic, now),
            serving=min(1.0, served.busy),  # 1 for more than one at once
            checkpoint=1.0 if saving else 0.0,
            owner=owner,
        )
        shell.post(events.MachineMeasured(pressure, answers))
        told_at = now


def _bodies(traffic: Traffic) -> int:
    both = (traffic.up, traffic.down)
    return sum(each.total() - sum(each[kind] for kind in _NOT_BODIES) for each in both)


def _link(traffic: Traffic, now: float) -> float:
    """How full the uplink is: by what leaves, or by what messages suffer from others' traffic."""
    uplink = traffic.uplink
    used = uplink.sent_per_s(now) / uplink.carried if uplink.carried else 0.0
    return min(1.0, max(used, uplink.delay_s(now) / DELAY_S))
