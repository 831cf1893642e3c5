"""What a node holds: memory that ends with its rounds, a disk that may refuse, and restarts."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_swarm import FRAGMENTS, GENESIS, RUN, A, B, open_holdings
from merge_history import P, make_history
from virtual_clock import run_virtual

from p2pdiloco.compress.codec import encode
from p2pdiloco.protocol.lineage import Chain, Contributor
from p2pdiloco.protocol.naming import RoundId
from p2pdiloco.simulation.machine import KeyedSigner
from p2pdiloco_bootstrap.serving import FilePart
from p2pdiloco_daemon.storage.disk_queue import WRITES_WAITING_MAX
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.replica import pack_state

HISTORY = make_history(9)
ROUND = RoundId(P, 1, 0, 0)
PAYLOAD = encode(np.full(FRAGMENTS[P].size, 0.1, np.float32), "float32")
PARTS = (Contributor(B, 100, 10),)
GENESIS_DIGESTS = [state.digest for state in GENESIS]

Scenario = Callable[[Holdings], Coroutine[None, None, None]]


def play(directory: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with open_holdings(directory) as holdings:
            await scenario(holdings)

    run_virtual(main())


async def load_genesis(holdings: Holdings) -> None:
    holdings.load(GENESIS[P], (), (), None)


async def apply_merges(holdings: Holdings, versions: Sequence[int]) -> None:
    for version in versions:
        await holdings.apply(HISTORY.records[version - 1], HISTORY.payloads[version - 1])


async def all_written(holdings: Holdings) -> None:
    await holdings.disk.run(lambda: None)
    await asyncio.sleep(0)


def chain_on_disk(directory: Path, genesis: Sequence[str] = GENESIS_DIGESTS) -> Chain | None:
    """What a restart makes of the directory, whose replica stands where the chain says."""
    chains: list[Chain | None] = []

    async def scenario(holdings: Holdings) -> None:
        chains.extend(holdings.resume(RUN, genesis, KeyedSigner(A)))
        chain, state = chains[P], holdings.replica.state(P)
        assert chains[0] is None
        assert (state and state.version) == (chain and chain.version)
        if state and state.version:
            assert state.digest == HISTORY.states[state.version].digest

    play(directory, scenario)
    return chains[P]


# -------------------------------------------------------------------- rounds


def test_what_arrives_after_the_end_of_its_round_is_not_kept(tmp_path: Path) -> None:
    async def scenario(holdings: Holdings) -> None:
        await load_genesis(holdings)
        holdings.open_round(ROUND)
        pull = asyncio.create_task(holdings.take_in(ROUND, B, PAYLOAD))
        await asyncio.sleep(0)
        holdings.drop_round(ROUND)
        await pull
        assert not holdings.num_rounds

    play(tmp_path, scenario)


def test_a_merge_that_is_dropped_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async def scenario(holdings: Holdings) -> None:
        await load_genesis(holdings)
        holdings.open_round(ROUND)
        await holdings.take_in(ROUND, B, PAYLOAD)
        merging = asyncio.create_task(holdings.merge(ROUND, PARTS))
        await asyncio.sleep(0)
        holdings.drop_round(ROUND)
        await merging
        assert not holdings.num_rounds
        state = holdings.replica.state(P)
        assert state and state.version == 0

    play(tmp_path, scenario)


# -------------------------------------------------------------------- restarts


def write_history(directory: Path, num_merges: int = 9) -> None:
    async def scenario(holdings: Holdings) -> None:
        await load_genesis(holdings)
        await apply_merges(holdings, range(1, num_merges + 1))

    play(directory, scenario)


def test_a_restart_stands_where_the_last_life_ended(tmp_path: Path) -> None:
    write_history(tmp_path)
    chain = chain_on_disk(tmp_path)
    assert chain and chain.head == HISTORY.records[-1]


def test_a_restart_knows_the_records_of_merges_that_are_kept_no_more(tmp_path: Path) -> None:
    write_history(tmp_path)  # snapshots at 0, 4 and 8, of which two are kept
    chain = chain_on_disk(tmp_path)
    assert chain and (chain.base, tuple(chain.records)) == (0, HISTORY.records)


def test_records_that_do_not_read_end_the_chain(tmp_path: Path) -> None:
    write_history(tmp_path)
    (tmp_path / "fragments" / f"{P:04d}" / "records").write_bytes(b"garbage")
    chain = chain_on_disk(tmp_path)
    assert chain and tuple(chain.records) == HISTORY.records[4:]


def test_an_empty_directory_holds_nothing(tmp_path: Path) -> None:
    assert chain_on_disk(tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"garbage", bytes(500)])
def test_a_garbage_merge_is_where_the_restart_ends(tmp_path: Path, damage: bytes) -> None:
    write_history(tmp_path, 7)
    newest = max((tmp_path / "fragments" / f"{P:04d}").glob("*.merge"))
    newest.write_bytes(damage)
    chain = chain_on_disk(tmp_path)
    assert chain and chain.version == 6


@pytest.mark.parametrize("damage", [b"", b"garbage", bytes(500)])
def test_behind_a_garbage_snapshot_lies_an_older_one(tmp_path: Path, damage: bytes) -> None:
    write_history(tmp_path)
    newest = max((tmp_path / "fragments" / f"{P:04d}").glob("*.snapshot"))
    newest.write_bytes(damage)
    chain = chain_on_disk(tmp_path)
    assert chain and chain.head == HISTORY.records[-1]


def test_with_every_file_damaged_the_node_starts_anew(tmp_path: Path) -> None:
    write_history(tmp_path)
    for path in (tmp_path / "fragments" / f"{P:04d}").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert chain_on_disk(tmp_path) is None


def test_another_runs_genesis_is_of_no_use(tmp_path: Path) -> None:
    write_history(tmp_path, 2)
    assert chain_on_disk(tmp_path, ["0" * 64] * 3) is None


def test_the_log_of_a_losing_lineage_is_forgotten(tmp_path: Path) -> None:
    write_history(tmp_path)

    async def fork(holdings: Holdings) -> None:
        holdings.load(HISTORY.states[2], HISTORY.records[:2], (), HISTORY.records[1].weight)
        await all_written(holdings)
        assert [s.version for s in holdings.snapshots(P)] == [8, 4], "it is no heavier yet"
        await apply_merges(holdings, [3])

    play(tmp_path, fork)
    chain = chain_on_disk(tmp_path)
    assert chain and chain.head == HISTORY.records[2]


# -------------------------------------------------------------------- a disk that refuses


class FullDisk:
    """Renaming a finished file into place is what fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.only_for = ""
        replace = Path.replace

        def replace_if_there_is_room(path: Path, target: Path) -> Path:
            if self.is_full and self.only_for in target.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return replace(path, target)

        monkeypatch.setattr(Path, "replace", replace_if_there_is_room)


def test_a_full_disk_stops_no_training_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)

    async def scenario(holdings: Holdings) -> None:
        await load_genesis(holdings)
        await apply_merges(holdings, [1])
        await all_written(holdings)
        assert holdings.disk.error is None and holdings.disk.saved_at is not None
        disk.is_full = True
        await apply_merges(holdings, [2, 3])
        await all_written(holdings)
        assert holdings.disk.error and "No space left" in holdings.disk.error
        state = holdings.replica.state(P)
        assert state and state.version == 3
        disk.is_full = False
        await apply_merges(holdings, [4, 5])
        await all_written(holdings)
        assert holdings.disk.error is None

    play(tmp_path, scenario)
    chain = chain_on_disk(tmp_path)
    assert chain and tuple(chain.records) == HISTORY.records[:5], "those of 2 and 3 as well"


def test_a_small_file_that_fits_does_not_hide_a_large_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    disk.is_full, disk.only_for = True, ".merge"

    async def scenario(holdings: Holdings) -> None:
        await load_genesis(holdings)
        await apply_merges(holdings, [1])
        holdings.save_json("node", {})
        await all_written(holdings)
        assert holdings.disk.error and ".merge" in holdings.disk.error

    play(tmp_path, scenario)


def test_writes_wait_within_bounds(tmp_path: Path) -> None:
    async def scenario(holdings: Holdings) -> None:
        slow = threading.Event()
        waiting = asyncio.create_task(holdings.disk.run(slow.wait))
        await asyncio.sleep(0)
        for number in range(WRITES_WAITING_MAX + 10):
            holdings.save_json("node", {"number": number})
        assert holdings.disk.error and "64 writes are waiting" in holdings.disk.error
        slow.set()
        await waiting
        await all_written(holdings)
        assert holdings.load_json("node") == {"number": WRITES_WAITING_MAX - 1}
        assert holdings.disk.error is None

    play(tmp_path, scenario)


def test_a_bug_while_saving_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(holdings: Holdings) -> None:
        holdings.save_json("node", {"no JSON": object()})
        await all_written(holdings)
        assert holdings.disk.error and "not JSON serializable" in holdings.disk.error

    play(tmp_path, scenario)
    assert "Traceback" in caplog.text


# -------------------------------------------------------------------- other nodes


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ENOENT])
def test_a_directory_that_cannot_be_looked_through_keeps_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: object) -> None:
        raise OSError(number, os.strerror(number))

    async def scenario(holdings: Holdings) -> None:
        holdings.save_json("node", {"number": 7})
        await holdings.measure_disk(tmp_path)
        before = holdings.bytes_on_disk
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", refuse)
            await holdings.measure_disk(tmp_path)
        assert holdings.bytes_on_disk == before > 0

    play(tmp_path, scenario)


def test_only_a_state_on_offer_is_copied_for_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)

    async def scenario(holdings: Holdings) -> None:
        disk.is_full = True
        await load_genesis(holdings)
        await all_written(holdings)
        genesis = await holdings.state_body(P, 0, GENESIS[P].digest)
        assert genesis == pack_state(GENESIS[P]), "on offer, since nothing is on disk"
        disk.is_full = False
        await apply_merges(holdings, [1, 2])
        await all_written(holdings)
        first, second = HISTORY.states[1], HISTORY.states[2]
        assert isinstance(await holdings.state_body(P, 1, first.digest), FilePart)
        assert await holdings.state_body(P, 2, second.digest) is None, "held, and not on offer"

    play(tmp_path, scenario)


def test_who_asks_for_states_that_never_were_is_not_remembered(tmp_path: Path) -> None:
    async def scenario(holdings: Holdings) -> None:
        await load_genesis(holdings)
        await apply_merges(holdings, [1, 2, 3])
        for version in range(300):
            assert await holdings.state_body(P, version, "ab" * 32) is None
        assert sorted(holdings._read_at[P]) == [0, 1, 2, 3]

    play(tmp_path, scenario)


def test_addresses_of_others_outlive_the_node(tmp_path: Path) -> None:
    addresses = {A: ("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.1/tcp/2"), B: ()}

    async def learn(holdings: Holdings) -> None:
        assert holdings.load_peers() == {}
        holdings.save_peers(addresses)

    async def remember(holdings: Holdings) -> None:
        assert holdings.load_peers() == addresses

    play(tmp_path, learn)
    play(tmp_path, remember)


@pytest.mark.parametrize("content", ["", "[]", '{"anna": 3}', "\x00"])
def test_damaged_addresses_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "peers.json").write_text(content)

    async def remember(holdings: Holdings) -> None:
        assert holdings.load_peers() == {}

    play(tmp_path, remember)
