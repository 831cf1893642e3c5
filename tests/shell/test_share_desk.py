"""How a share arrives over a real loopback socket, and what is refused."""

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgpack
import pytest
from rollout_swarm import GROUP_SIZE, NUM_TRAJECTORIES, Worker, episode_of, rulebook
from virtual_clock import run_virtual
from yarl import URL

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.rl.episodes import pack
from p2pdiloco_bootstrap.serving import PLAIN_TCP, Traffic, new_application, serving_on_tcp
from p2pdiloco_daemon.exchange import Busy, Exchange, Refused
from p2pdiloco_daemon.rl import share_desk
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.share_desk import (
    NotYet,
    ShareDesk,
    pack_share,
    share_path,
    unpack_groups,
    unpack_share,
)

ME, GIVER = PeerId("me"), PeerId(PLAIN_TCP)
STEP = 2


class Standing:
    def __init__(self) -> None:
        self.me = ME
        self.version = STEP
        self.head: str | None = "ours"
        self.dispatcher: PeerId | None = GIVER
        self.blamed: list[tuple[PeerId, str]] = []
        self.learnt: list[tuple[int, int]] = []
        """(step, episodes) of each share."""
        self.worker = Worker(version=STEP)
        checker = Checker(
            own=lambda: self.worker,
            rulebook_of=rulebook,
            replayed_share=1.0,
            rng=random.Random(0),
        )
        self.desk = ShareDesk(self, GROUP_SIZE, checker, lambda: self)

    def may_dispatch(self, peer: PeerId) -> bool:
        return peer == self.dispatcher

    def blame(self, peer: PeerId, reason: str) -> None:
        self.blamed.append((peer, reason))

    def learn(self, step: int, episodes: Sequence[bytes]) -> bool:
        self.learnt.append((step, len(episodes)))
        return True


@asynccontextmanager
async def asking(standing: Standing) -> AsyncIterator[Exchange]:
    app = new_application(1 << 16)
    standing.desk.add_to(app.router)
    async with serving_on_tcp(app) as url, aiohttp.ClientSession() as session:
        yield Exchange(session, Traffic(), lambda peer, path: URL(url) / path.lstrip("/"))


def run(standing: Standing, script: Callable[[Exchange], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(300), asking(standing) as exchange:
            await script(exchange)

    asyncio.run(main())


def hand(standing: Standing, body: bytes, step: int = STEP) -> None:
    run(standing, lambda exchange: exchange.hand("peer", share_path(step), body))


def episodes(*trajectories: int) -> list[bytes]:
    return [pack(episode_of(STEP, trajectory)) for trajectory in trajectories]


def test_a_true_share_reaches_the_learner_once() -> None:
    standing = Standing()

    async def script(exchange: Exchange) -> None:
        for _ in range(2):
            await exchange.hand("peer", share_path(STEP), pack_share(episodes(0, 1, 5)))
        await exchange.hand("peer", share_path(STEP), pack_share(episodes(5, 6)))
        got = await exchange.get("peer", share_path(STEP), 1 << 16)
        assert unpack_groups(got) == [0, 1, 2]

    run(standing, script)
    assert standing.learnt == [(STEP, 3), (STEP, 1)]
    assert not standing.blamed


def test_a_share_that_takes_long_to_look_through_is_taken_in_the_end() -> None:
    class Slow(Worker):
        async def check(
            self,
            step: int,
            episodes: Sequence[bytes],
            replayed: Collection[int],
            *,
            ended: bool = True,
        ) -> list[str | None]:
            await asyncio.sleep(0.4 * share_desk.CHECK_S * len(replayed))
            return await super().check(step, episodes, replayed, ended=ended)

    async def script() -> None:
        standing = Standing()
        standing.worker = Slow(version=STEP)
        share = episodes(0, 1, 2, 3, 4)
        for _ in range(2):
            with pytest.raises(NotYet):
                await standing.desk.take(GIVER, STEP, share)
        await standing.desk.take(GIVER, STEP, share)
        assert standing.learnt == [(STEP, 5)]

    run_virtual(script())


def test_an_empty_share_is_one() -> None:
    standing = Standing()
    hand(standing, pack_share([]))
    hand(standing, pack_share([]))
    assert standing.learnt == [(STEP, 0)]


def test_a_share_larger_than_one_piece_arrives_whole() -> None:
    standing = Standing()
    body = pack_share([*episodes(*range(NUM_TRAJECTORIES)), bytes(1 << 20)])
    with pytest.raises(Refused, match="malformed episode"):
        hand(standing, body)


def test_nothing_was_taken_before_the_first_share() -> None:
    async def script(exchange: Exchange) -> None:
        with pytest.raises(Refused) as refused:
            await exchange.get("peer", share_path(STEP), 1 << 16)
        assert refused.value.status == 404

    run(Standing(), script)


def test_who_does_not_dispatch_hands_out_nothing() -> None:
    standing = Standing()
    standing.dispatcher = PeerId("another")
    with pytest.raises(Refused, match="dispatched by another as seen from here"):
        hand(standing, pack_share(episodes(0)))
    assert not standing.learnt
    assert not standing.blamed


def test_a_share_of_a_version_to_come_may_come_again() -> None:
    with pytest.raises(Busy, match="this node is at 2 still"):
        hand(Standing(), pack_share([]), step=STEP + 1)


def test_a_share_of_a_version_gone_by_is_refused() -> None:
    with pytest.raises(Refused, match="this node is at 2 already"):
        hand(Standing(), pack_share([]), step=STEP - 1)


FORGED = pack(episode_of(STEP, 0, salt="forged"))
INVENTED = pack(replace(episode_of(STEP, 0), reward=0.875))
LIES = {
    "invented reward": pack_share([INVENTED]),
    "the same twice": pack_share(episodes(1, 1)),
    "another step": pack_share([pack(episode_of(STEP + 1, 0))]),
    "no trajectory of it": pack_share([pack(replace(episode_of(STEP, 0), trajectory=99))]),
    "rubbish": b"rubbish",
    "an episode of rubbish": pack_share([b"rubbish"]),
    "other words": msgpack.packb({"episodes": [], "more": 1}),
    "too many": pack_share([b""] * 5000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_share_that_is_not_true_is_refused_and_its_giver_blamed(lie: str) -> None:
    standing = Standing()
    with pytest.raises(Refused) as refused:
        hand(standing, LIES[lie])
    assert refused.value.status == 409
    assert [peer for peer, _ in standing.blamed] == [GIVER]
    assert not standing.learnt


def test_a_wrong_token_is_told_to_its_giver_before_it_is_held_against_it() -> None:
    standing = Standing()
    body = pack_share([*episodes(1), FORGED])
    for status, num_blamed in ((422, 0), (409, 1)):
        with pytest.raises(Refused) as refused:
            hand(standing, body)
        assert refused.value.status == status
        assert len(standing.blamed) == num_blamed
    assert not standing.learnt


def test_a_share_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_desk, "SHARE_BYTES_MAX", 1000)
    standing = Standing()
    with pytest.raises(Refused) as refused:
        hand(standing, pack_share([bytes(5000)]))
    assert refused.value.status == 413
    assert not standing.learnt


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa8episodes\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
        b"\x81\xa8episodes\xdc\x01\x00" + (b"\xdc\x10\x00" + b"\x90" * 4096) * 256,
        b"\x81\xa8episodes\xdc\x01\x00" + (b"\xdc\x10\x00" + b"\x80" * 4096) * 256,
        b"\xdf\x00\x10\x00\x00" + b"\xa0\x90" * (1 << 20),
    ],
    ids=["many lists", "lists in lists", "maps in lists", "a large map"],
)
def test_a_share_takes_no_more_memory_than_it_has_bytes(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PeerError):
            unpack_share(body)
        _, num_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 1 << 20


class Gated(Worker):
    """Looks through nothing before it may."""

    def __init__(self) -> None:
        super().__init__(version=STEP)
        self.is_asked, self.may_look = asyncio.Event(), asyncio.Event()

    async def check(
        self, step: int, episodes: Sequence[bytes], replayed: Collection[int], *, ended: bool = True
    ) -> list[str | None]:
        self.is_asked.set()
        await self.may_look.wait()
        return await super().check(step, episodes, replayed, ended=ended)


def test_a_giver_has_one_share_here_at_a_time() -> None:
    standing = Standing()
    standing.worker = worker = Gated()

    async def script(exchange: Exchange) -> None:
        share = pack_share(episodes(0))
        first = asyncio.create_task(exchange.hand("peer", share_path(STEP), share))
        await worker.is_asked.wait()
        with pytest.raises(Busy, match="another share of yours"):
            await exchange.hand("peer", share_path(STEP), pack_share(episodes(1)))
        worker.may_look.set()
        await first

    run(standing, script)
    assert standing.learnt == [(STEP, 1)]


def test_what_was_taken_on_another_lineage_is_none_of_this_one() -> None:
    standing = Standing()
    hand(standing, pack_share(episodes(0, 1)))
    standing.head = "theirs"
    assert standing.desk.groups(STEP) is None
    standing.desk.learner_started()
    hand(standing, pack_share(episodes(1)))
    assert standing.learnt == [(STEP, 2), (STEP, 1)]
    assert standing.desk.groups(STEP) == {0}


def test_nobody_is_blamed_where_the_lineage_changes_while_a_share_is_looked_through() -> None:
    standing = Standing()
    standing.worker = worker = Gated()

    async def script(exchange: Exchange) -> None:
        share = pack_share([INVENTED])
        handing = asyncio.create_task(exchange.hand("peer", share_path(STEP), share))
        await worker.is_asked.wait()
        standing.head = "theirs"
        worker.may_look.set()
        with pytest.raises(Busy, match="another lineage"):
            await handing

    run(standing, script)
    assert not standing.learnt
    assert not standing.blamed


def test_a_body_that_never_ends_is_given_up_and_keeps_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standing = Standing()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.01)

    async def script(exchange: Exchange) -> None:
        url = exchange._url("peer", share_path(STEP))
        with monkeypatch.context() as patch:
            patch.setattr(share_desk, "BODY_S", 0.2)
            async with exchange._session.post(url, data=endless()) as response:
                assert response.status == 408
        await exchange.hand("peer", share_path(STEP), pack_share(episodes(0)))

    run(standing, script)
    assert standing.learnt == [(STEP, 1)]


def test_a_learner_that_is_started_again_gets_its_share_again() -> None:
    standing = Standing()
    hand(standing, pack_share(episodes(0)))
    standing.desk.learner_started()
    assert standing.learnt == [(STEP, 1), (STEP, 1)]
    standing.version = STEP + 1
    standing.desk.learner_started()
    assert len(standing.learnt) == 2


def test_a_share_is_checked_without_a_worker_while_there_is_none() -> None:
    standing = Standing()
    standing.worker.is_up = False
    with pytest.raises(Refused, match="its reward is another"):
        hand(standing, pack_share([INVENTED]))
    hand(standing, pack_share(episodes(0)))
    assert standing.learnt == [(STEP, 1)]
