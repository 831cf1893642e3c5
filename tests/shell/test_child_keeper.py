"""When a child process that dies is started again."""

import asyncio

from virtual_clock import run_virtual

from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.children.keeper import HEALTHY_S, RESTART_DELAY_MAX_S, ChildKeeper
from p2pdiloco_daemon.learner.messages import Ready, Stop

NO_MEMORY_FD = -1


class Mortal(ChildKeeper[Stop, Ready]):
    """Its process lives for `life_s` seconds of a clock, and is none."""

    name = "the process"
    goodbye = Stop()

    def __init__(self, life_s: float) -> None:
        super().__init__(1, NO_MEMORY_FD, None)
        self.life_s = life_s
        self.told: asyncio.Queue[tuple[str, float]] = asyncio.Queue()

    async def _live(self) -> str:
        await asyncio.sleep(self.life_s)
        return "it died"

    def _tell_death(self, reason: str, restart_in_s: float) -> None:
        self.told.put_nowait((reason, restart_in_s))

    def _greeting(self) -> Stop:
        raise NotImplementedError

    async def _deliver(self, child: Child[Stop], message: Ready) -> None:
        raise NotImplementedError

    async def _accompany(self, child: Child[Stop]) -> None:
        raise NotImplementedError

    def _life_over(self, reason: str) -> None:
        raise NotImplementedError


def deaths(num: int, *, life_s: float) -> list[tuple[str, float]]:
    """What is told of so many."""

    async def scenario() -> list[tuple[str, float]]:
        keeper = Mortal(life_s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keeper.keep_alive())
            told = [await keeper.told.get() for _ in range(num)]
            await keeper.stop()
        return told

    return run_virtual(scenario())


def test_restarts_wait_longer_and_longer_and_say_when_it_is_a_crash_loop() -> None:
    told = deaths(8, life_s=0.5)
    assert [delay_s for _reason, delay_s in told] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [reason for reason, _delay_s in told[:3]] == [
        "it died",
        "it died",
        "crash loop, 3 deaths in a row: it died",
    ]


def test_who_has_lived_long_is_started_again_soon() -> None:
    assert deaths(3, life_s=HEALTHY_S) == [("it died", 1.0)] * 3


def test_a_crash_loop_of_days_is_still_kept_up() -> None:
    assert deaths(1200, life_s=0.5)[-1][1] == RESTART_DELAY_MAX_S
