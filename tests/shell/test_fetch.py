"""Fetching from several donors in virtual time: who is asked, and what a bad donor costs."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from virtual_clock import run_virtual

from p2pdiloco.errors import PeerError
from p2pdiloco_daemon.fetch import Gathering, NotGathered, gather_chunks

MB = 1 << 20
DATA = bytes(range(251)) * (12 * MB // 251)


class Donors:
    """Donors that send `DATA` at so many chunks per second, until they break."""

    def __init__(self, chunks_per_s: dict[str, float]) -> None:
        self.chunks_per_s = chunks_per_s
        self.asked: Counter[str] = Counter()
        self.breaks: dict[str, Exception] = {}
        self.works_first: Counter[str] = Counter()
        """Chunks that a donor gives before it breaks."""

    async def fetch(
        self, donor: str, start: int, place: memoryview, progress: Callable[[], None]
    ) -> None:
        self.asked[donor] += 1
        if donor in self.breaks and self.asked[donor] > self.works_first[donor]:
            raise self.breaks[donor]
        for _ in range(10):
            await asyncio.sleep(0.1 / self.chunks_per_s[donor])
            progress()
        place[:] = DATA[start : start + len(place)]

    def gather(self, body: Gathering | None = None) -> tuple[Gathering, float]:
        body = body or Gathering(len(DATA))

        async def timed() -> float:
            await gather_chunks(list(self.chunks_per_s), body, self.fetch)
            return asyncio.get_running_loop().time()

        return body, run_virtual(timed())


def test_equal_donors_share_the_chunks() -> None:
    donors = Donors({"a": 1, "b": 1, "c": 1})
    gathered, took_s = donors.gather()
    assert gathered.data == DATA
    assert donors.asked == {"a": 4, "b": 4, "c": 4}
    assert took_s == pytest.approx(2.0)


def test_a_fast_donor_gives_more() -> None:
    donors = Donors({"slow": 1, "fast": 5})
    gathered, _ = donors.gather()
    assert gathered.data == DATA
    assert Counter(gathered.donors.values())["fast"] >= 9


def test_a_donor_that_breaks_off_is_replaced_by_the_others() -> None:
    donors = Donors({"a": 1, "b": 1})
    donors.breaks["b"] = ConnectionError("reset")
    donors.works_first["b"] = 3
    gathered, took_s = donors.gather()
    assert gathered.data == DATA
    assert Counter(gathered.donors.values()) == {"a": 9, "b": 3}
    assert took_s < 6


def test_a_donor_recovers_from_one_failure() -> None:
    donors = Donors({"only": 1})
    failures = iter([ConnectionError("reset"), TimeoutError("silent")])

    async def fetch(
        donor: str, start: int, place: memoryview, progress: Callable[[], None]
    ) -> None:
        for failure in failures:
            raise failure
        await donors.fetch(donor, start, place, progress)

    body = Gathering(len(DATA))
    run_virtual(gather_chunks(["only"], body, fetch))
    assert body.data == DATA


def test_a_hung_donor_costs_the_stall_time_only() -> None:
    donors = Donors({"a": 10, "hung": 1e-9})
    gathered, took_s = donors.gather()
    assert gathered.data == DATA
    assert set(gathered.donors.values()) == {"a"}
    assert took_s < 3.5


def test_a_slow_last_chunk_is_asked_of_a_faster_donor_too() -> None:
    donors = Donors({"a": 10, "slow": 0.01})
    gathered, took_s = donors.gather()
    assert gathered.data == DATA
    assert took_s < 3


def test_moving_donors_are_not_asked_twice_on_a_slow_line() -> None:
    donors = Donors({"a": 0.1, "b": 0.1})
    donors.gather()
    assert donors.asked.total() == 12


def test_a_rest_in_a_long_fetch_is_no_stall() -> None:
    donors = Donors({"a": 0.095, "resting": 0.05})
    steps = iter(range(1000))

    async def fetch(
        donor: str, start: int, place: memoryview, progress: Callable[[], None]
    ) -> None:
        def rest() -> None:
            if donor == "a" or next(steps) % 4 > 1:
                progress()

        await donors.fetch(donor, start, place, rest)

    body = Gathering(len(DATA))
    body.data[:MB] = DATA[:MB]
    body.add_kept([(0, MB)])
    run_virtual(gather_chunks(["a", "resting"], body, fetch))
    assert body.data == DATA
    assert donors.asked.total() == 11


def test_a_donor_without_the_bytes_is_asked_once_per_worker() -> None:
    donors = Donors({"empty": 1, "b": 1})
    donors.breaks["empty"] = PeerError("404 not kept here")
    gathered, _ = donors.gather()
    assert gathered.data == DATA
    assert donors.asked["empty"] <= 2


def test_four_donors_work_and_the_others_wait_in_reserve() -> None:
    donors = Donors(dict.fromkeys("abcdef", 1))
    donors.breaks["b"] = PeerError("404 not kept here")
    gathered, _ = donors.gather()
    assert gathered.data == DATA
    assert set(gathered.donors.values()) == {"a", "c", "d", "e"}
    assert donors.asked["f"] == 0


def test_no_donor_left_names_the_reason_of_each() -> None:
    donors = Donors({"a": 1, "b": 1})
    donors.breaks |= {"a": ConnectionError("refused"), "b": PeerError("404 not kept here")}
    with pytest.raises(NotGathered) as caught:
        donors.gather()
    assert caught.value.reasons == {"a": "refused", "b": "404 not kept here"}


def test_cancelling_a_fetch_ends_its_workers() -> None:
    async def cancelled() -> int:
        donors = Donors({"a": 1e-9})
        body = Gathering(len(DATA))
        task = asyncio.create_task(gather_chunks(["a"], body, donors.fetch))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        return len(asyncio.all_tasks())

    assert run_virtual(cancelled()) == 1
