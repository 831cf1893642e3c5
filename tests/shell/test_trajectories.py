"""The daemon's side of turns and checks, with a worker that only notes what it is sent."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import cast

import pytest

from p2pdiloco.protocol.turns import Held, Holding, TurnId
from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.rollouts.messages import (
    Cancel,
    Check,
    Checked,
    Command,
    Installed,
    Play,
    Refused,
    Speeds,
)
from p2pdiloco_daemon.rollouts.messages import Played as PlayedThere
from p2pdiloco_daemon.rollouts.trajectories import (
    CHECKS_AT_ONCE,
    HISTORY_BYTES_MAX,
    TURNS_MAX,
    UNSENT_BYTES_MAX,
    RolloutsBusy,
    Trajectories,
    TurnRefused,
)

TURN = TurnId(5, 2, 0)
SPEEDS = Speeds(8, 4096, 1000.0, array("i", [1, 2]).tobytes(), array("f", [0.5, 0.75]).tobytes())


class Worker:
    """Notes commands, and answers checks with the length of their episode if told to."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.is_there = True
        self.num_unsent = 0
        self._more = asyncio.Event()
        numbers = count(1)
        self.trajectories = Trajectories(self._child, lambda: next(numbers))
        self.trajectories.take(Installed(5, 0.1))
        self.trajectories.take(SPEEDS)

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if isinstance(command, Play):
            self.num_unsent += len(command.history)
        self._more.set()

    def _child(self) -> Child[Command]:
        if not self.is_there:
            raise RolloutsBusy("the rollout worker is starting")
        return cast("Child[Command]", self)

    def plays(self, number: int, turn: int = 1, *, has_ended: bool = False) -> None:
        self.trajectories.take(PlayedThere(number, turn, has_ended, 30, 16, b"episode"))

    async def until_sent(self, number: int) -> None:
        while len(self.sent) < number:
            self._more.clear()
            await self._more.wait()


def run(story: Callable[[Worker], Awaitable[None]]) -> None:
    async def with_worker() -> None:
        async with asyncio.timeout(300):
            await story(Worker())

    asyncio.run(with_worker())


def test_a_turn_is_played_and_held_until_the_policy_changes() -> None:
    async def story(worker: Worker) -> None:
        asking = asyncio.create_task(worker.trajectories.play(TURN, b""))
        await worker.until_sent(1)
        assert worker.sent == [Play(1, 5, 2, 0, b"")]
        worker.plays(1)
        played = await asking
        assert played.held == Held(TurnId(5, 2, 1), Holding.READY, 30)
        assert (played.num_reused, played.episode) == (16, b"episode")
        assert worker.trajectories.held(5, 2) == played
        load = worker.trajectories.load()
        assert load is not None and load.held == (played.held,)
        assert load.token_s == ((1, 0.5), (2, 0.75))
        worker.trajectories.take(Installed(6, 0.1))
        assert worker.trajectories.held(5, 2) is None

    run(story)


def test_the_next_turn_needs_no_history_where_it_is_held() -> None:
    async def story(worker: Worker) -> None:
        asking = asyncio.create_task(worker.trajectories.play(TURN, b""))
        await worker.until_sent(1)
        worker.plays(1)
        await asking
        asking = asyncio.create_task(worker.trajectories.play(TurnId(5, 2, 1), b""))
        await worker.until_sent(2)
        assert worker.sent[1] == Play(2, 5, 2, 1, b"episode")
        worker.plays(2, has_ended=True)
        assert (await asking).holding is Holding.ENDED

    run(story)


def test_two_who_ask_for_the_same_turn_share_it_and_the_last_to_leave_withdraws_it() -> None:
    async def story(worker: Worker) -> None:
        first, second = (asyncio.create_task(worker.trajectories.play(TURN, b"")) for _ in range(2))
        other = asyncio.create_task(worker.trajectories.play(TURN, b"another history"))
        await worker.until_sent(2)
        first.cancel()
        await asyncio.wait({first})
        assert len(worker.sent) == 2
        second.cancel()
        await asyncio.wait({second})
        assert worker.sent[2] == Cancel(1)
        worker.plays(1)
        worker.plays(2)
        assert (await other).num_reused == 16

    run(story)


def test_what_others_than_the_dispatcher_have_played_is_not_gone_on_from() -> None:
    async def story(worker: Worker) -> None:
        trajectories, second = worker.trajectories, TurnId(5, 2, 1)
        asking = asyncio.create_task(trajectories.play(TURN, b""))
        await worker.until_sent(1)
        worker.plays(1)
        await asking
        other = asyncio.create_task(trajectories.play(TURN, b"forged", dispatched=False))
        await worker.until_sent(2)
        trajectories.take(PlayedThere(2, 1, False, 30, 16, b"what follows from it"))
        assert (await other).episode == b"what follows from it"
        other = asyncio.create_task(trajectories.play(second, b"", dispatched=False))
        asking = asyncio.create_task(trajectories.play(second, b""))
        await worker.until_sent(4)
        assert worker.sent[2:] == [Play(3, 5, 2, 1, b""), Play(4, 5, 2, 1, b"episode")]
        other.cancel()
        worker.plays(4, 2)
        await asking

    run(story)


def test_a_turn_that_others_ask_for_too_is_held_for_the_dispatcher() -> None:
    async def story(worker: Worker) -> None:
        play = worker.trajectories.play
        asking = [asyncio.create_task(play(TURN, b"", dispatched=is_)) for is_ in (False, True)]
        await worker.until_sent(1)
        await asyncio.sleep(0)
        worker.plays(1)
        played, _same = await asyncio.gather(*asking)
        assert worker.trajectories.held(5, 2) == played

    run(story)


def test_a_refusal_is_raised_as_what_it_is() -> None:
    async def story(worker: Worker) -> None:
        for is_busy, kind in ((True, RolloutsBusy), (False, TurnRefused)):
            worker.sent.clear()
            asking = asyncio.create_task(worker.trajectories.play(TURN, b""))
            await worker.until_sent(1)
            [play] = worker.sent
            assert isinstance(play, Play)
            worker.trajectories.take(Refused(play.id, "not so", is_busy))
            with pytest.raises(kind, match="not so"):
                await asking

    run(story)


def test_who_waits_for_a_worker_that_dies_is_told_so_and_what_was_played_stays() -> None:
    async def story(worker: Worker) -> None:
        asking = asyncio.create_task(worker.trajectories.play(TURN, b""))
        await worker.until_sent(1)
        worker.plays(1)
        await asking
        asking = asyncio.create_task(worker.trajectories.play(TurnId(5, 3, 0), b""))
        checking = asyncio.create_task(worker.trajectories.check(5, [b"one"], (), ended=True))
        await worker.until_sent(3)
        worker.is_there = False
        worker.trajectories.life_over("killed by SIGKILL")
        for waiting in (asking, checking):
            with pytest.raises(RolloutsBusy, match="SIGKILL"):
                await waiting
        assert worker.trajectories.load() is None
        worker.trajectories.take(Installed(5, 0.1))
        assert worker.trajectories.held(5, 2) is not None
        with pytest.raises(RolloutsBusy, match="is starting"):
            await worker.trajectories.play(TURN, b"")

    run(story)


def test_turns_have_bounds_in_number_and_history() -> None:
    async def story(worker: Worker) -> None:
        with pytest.raises(TurnRefused, match="bytes"):
            await worker.trajectories.play(TURN, bytes(HISTORY_BYTES_MAX + 1))
        asking = [
            asyncio.create_task(worker.trajectories.play(TurnId(5, i, 0), b""))
            for i in range(TURNS_MAX)
        ]
        await worker.until_sent(TURNS_MAX)
        with pytest.raises(RolloutsBusy, match="turns are in work"):
            await worker.trajectories.play(TurnId(5, TURNS_MAX, 0), b"")
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert sum(isinstance(command, Cancel) for command in worker.sent) == TURNS_MAX

    run(story)


def test_episodes_are_checked_some_at_a_time_in_their_order() -> None:
    async def story(worker: Worker) -> None:
        episodes = [b"%d" % i for i in range(CHECKS_AT_ONCE + 2)]
        episodes[3] = bytes(HISTORY_BYTES_MAX + 1)
        checking = asyncio.create_task(
            worker.trajectories.check(5, episodes, {1, CHECKS_AT_ONCE}, ended=False)
        )
        await worker.until_sent(CHECKS_AT_ONCE - 1)
        assert worker.sent[1] == Check(2, 5, b"1", ended=False, replayed=True)
        for number in range(1, len(episodes) + 1):
            await worker.until_sent(CHECKS_AT_ONCE - 1 if number <= CHECKS_AT_ONCE else 17)
            worker.trajectories.take(Checked(number, "wrong" if number == 2 else ""))
        found = await checking
        assert worker.sent[-2] == Check(CHECKS_AT_ONCE + 1, 5, b"16", ended=False, replayed=True)
        assert [index for index, refusal in enumerate(found) if refusal] == [1, 3]
        assert found[1] == "wrong"

    run(story)


def test_a_check_that_nobody_waits_for_any_more_is_cancelled() -> None:
    async def story(worker: Worker) -> None:
        checking = asyncio.create_task(worker.trajectories.check(5, [b"1", b"2"], (), ended=True))
        await worker.until_sent(2)
        worker.trajectories.take(Checked(1, ""))
        checking.cancel()
        await asyncio.wait({checking})
        assert worker.sent[2:] == [Cancel(2)]
        worker.trajectories.take(Checked(2, ""))

    run(story)


def test_nothing_is_held_of_a_lineage_that_was_left() -> None:
    async def story(worker: Worker) -> None:
        asking = [
            asyncio.create_task(worker.trajectories.play(TurnId(5, trajectory, 0), b""))
            for trajectory in range(2)
        ]
        await worker.until_sent(2)
        worker.plays(1)
        worker.trajectories.void()
        assert worker.trajectories.load() is None
        assert worker.trajectories.held(5, 0) is None
        worker.plays(2)
        worker.trajectories.take(Installed(5, 0.1))
        assert worker.trajectories.load() is not None
        assert worker.trajectories.held(5, 1) is None
        await asyncio.gather(*asking)

    run(story)


def test_who_asks_and_withdraws_for_ever_fills_no_memory() -> None:
    async def story(worker: Worker) -> None:
        history = bytes(HISTORY_BYTES_MAX)
        with pytest.raises(RolloutsBusy, match="has not read all"):
            for trajectory in range(2 * UNSENT_BYTES_MAX // HISTORY_BYTES_MAX):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        await worker.trajectories.play(TurnId(5, trajectory, 1), history)
        assert worker.num_unsent <= UNSENT_BYTES_MAX + HISTORY_BYTES_MAX

    run(story)
