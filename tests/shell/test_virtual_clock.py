"""The clock that the other tests here trust."""

import asyncio

import pytest
from virtual_clock import CountedExecutor, run_virtual


def test_a_day_of_sleep_takes_no_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(86400)
        return asyncio.get_running_loop().time()

    assert run_virtual(sleep()) == pytest.approx(86400)


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(wait())


def test_time_stands_still_while_a_thread_works() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        with CountedExecutor(loop) as executor:
            timer = asyncio.create_task(asyncio.sleep(1))
            for _ in range(100):
                await loop.run_in_executor(executor, lambda: sum(range(1000)))
            assert await asyncio.to_thread(lambda: 7) == 7
            assert not timer.done()
            await timer
        return loop.time()

    assert run_virtual(work()) == pytest.approx(1)


def test_a_thread_hands_over_what_it_raised() -> None:
    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run_virtual(fail())
