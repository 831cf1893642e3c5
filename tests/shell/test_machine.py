"""What the core is told of the machine: answers served here, and whether a sync touched them."""

import asyncio
import errno
import json
import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from memory_swarm import Network, open_node
from virtual_clock import run_virtual

from p2pdiloco.errors import UserError
from p2pdiloco.protocol.calibration import Answer
from p2pdiloco.protocol.pacer import Served
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_daemon.learner.learner import Died, Saving
from p2pdiloco_daemon.machine import (
    SILENT_S,
    Processors,
    ServedLog,
    SyncSpans,
    measure_machine,
)
from p2pdiloco_daemon.report import LearnerReport


def report(*answers: tuple[float, float, float], **changes: Any) -> bytes:
    return json.dumps({"target_s": 0.2, "load": 3, "answers": answers} | changes).encode()


def test_answers_are_told_once_with_their_rate() -> None:
    async def scenario() -> None:
        log, now = ServedLog(), asyncio.get_running_loop().time
        assert log.since_last(now(), 1.0, SyncSpans()) is None
        log.take(report((0.5, 0.1, 1), (0.2, 0.3, 2)))
        answers = (Answer(0.1, 1, False), Answer(0.3, 2, False))
        assert log.since_last(now(), 2.0, SyncSpans()) == Served(0.2, 3, 1.0, answers)
        log.take(report())
        assert log.since_last(now(), 1.0, SyncSpans()) == Served(0.2, 3, 0.0)

    run_virtual(scenario())


def test_a_second_without_a_report_is_no_quiet_one() -> None:
    async def scenario() -> None:
        log, now = ServedLog(), asyncio.get_running_loop().time
        for _ in range(2):
            log.take(report((0.5, 0.1, 1), (0.2, 0.3, 2)))
            told = log.since_last(now(), 1.0, SyncSpans())
            assert told and told.rate == 2.0 and log.busy == pytest.approx(0.4)
            told = log.since_last(now(), 1.0, SyncSpans())
            assert told == Served(0.2, 3, 2.0) and log.busy == pytest.approx(0.4)
            log.take(report((0.5, 0.1, 1), (0.2, 0.3, 2)))
            told = log.since_last(now(), 1.0, SyncSpans())
            assert told and told.rate == 1.0 and log.busy == pytest.approx(0.2)
        await asyncio.sleep(SILENT_S + 1)
        assert log.since_last(now(), 1.0, SyncSpans()) is None and log.busy == 0

    run_virtual(scenario())


def test_who_has_gone_silent_serves_no_more() -> None:
    async def scenario() -> None:
        log, now = ServedLog(), asyncio.get_running_loop().time
        log.take(report())
        await asyncio.sleep(SILENT_S + 1)
        assert log.since_last(now(), 1.0, SyncSpans()) is None

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"garbage", "report: Invalid JSON"),
        (report(target_s=-1), "target_s: Input should be greater"),
        (report((0.1, -2.0, 0)), r"answers\.0"),
        (report(*[(0.0, 0.1, 0)] * 1001), "answers: Tuple should have at most 1000 items"),
    ],
)
def test_a_wrong_report_is_refused_with_a_reason(body: bytes, told: str) -> None:
    with pytest.raises(UserError, match=told):
        ServedLog().take(body)


def test_an_answer_was_disturbed_if_anything_moved_or_was_computed_meanwhile() -> None:
    spans = SyncSpans()
    for now, moved, computed, computing in [
        (1.0, 0, 0, False),
        (2.0, 500, 0, False),
        (3.0, 500, 0, False),
        (4.0, 500, 0, True),
        (5.0, 500, 1, False),
        (6.0, 500, 1, False),
    ]:
        spans.look(now, moved, computed, computing=computing)
    disturbed = [spans.overlap(at - 0.5, at) for at in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    assert disturbed == [False, True, False, True, True, False]


def test_the_share_of_other_programs_is_a_share() -> None:
    processors = Processors()
    assert 0 <= processors.share_of_others() <= 1


def test_what_a_child_used_is_not_that_of_others_once_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner has used 50 s of a core when it dies, in a second without other work."""
    scputimes = namedtuple("scputimes", ["user", "system", "idle"])
    pcputimes = namedtuple("pcputimes", ["user", "system", "children_user", "children_system"])
    learner = SimpleNamespace(cpu_times=lambda: pcputimes(48.0, 2.0, 0.0, 0.0))
    living, ended_s = [learner], 0.0

    class Daemon:
        def children(self, *, recursive: bool) -> list[SimpleNamespace]:
            return living

        def cpu_times(self) -> tuple[float, ...]:
            return pcputimes(1.0, 0.0, ended_s, 0.0)

    now_s = 100.0
    monkeypatch.setattr(psutil, "Process", Daemon)
    monkeypatch.setattr(psutil, "cpu_times", lambda: scputimes(51.0, 0.0, now_s - 51.0))
    processors = Processors()
    living.clear()
    now_s, ended_s = 101.0, 50.0
    assert processors.share_of_others() == 0


def test_a_machine_that_does_not_tell_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    processors = Processors()
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "cpu_times", refuse)
        assert processors.share_of_others() == 0
    assert 0 <= processors.share_of_others() <= 1


def test_the_core_is_told_every_second(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_node(Network(), tmp_path) as living:
            log = ServedLog()
            telling = living.tasks.create_task(
                measure_machine(log, living.holdings, living.shell, Traffic(), LearnerReport())
            )
            log.take(report((0.0, 0.4, 3)))
            await asyncio.sleep(1.5)
            pacer = living.node.state.pacer
            assert pacer.served and pacer.served.answers == (Answer(0.4, 3, False),)
            assert pacer.pressure.serving == pytest.approx(0.4)
            assert pacer.pressure.link == pacer.pressure.checkpoint == 0.0
            telling.cancel()

    run_virtual(scenario())


def test_a_checkpoint_that_the_learner_writes_is_pressure(tmp_path: Path) -> None:
    async def scenario() -> None:
        learner = LearnerReport()
        async with open_node(Network(), tmp_path) as living:
            telling = living.tasks.create_task(
                measure_machine(ServedLog(), living.holdings, living.shell, Traffic(), learner)
            )
            for event, pressure in (
                (Saving(True), 1.0),
                (Saving(False), 0.0),
                (Saving(True), 1.0),
                (Died("killed", 1.0), 0.0),
            ):
                learner.take(event, 0.0)
                await asyncio.sleep(2.5)
                assert living.node.state.pacer.pressure.checkpoint == pressure
            telling.cancel()

    run_virtual(scenario())
