"""Real shells train in virtual time: they agree to the last bit, and survive deaths."""

from pathlib import Path

import pytest
from memory_swarm import BOOT, GENESIS, A, B, C, Swarm, play_swarm, rot

from p2pdiloco_daemon import fetch
from p2pdiloco_daemon.storage.holdings import LEASE_MERGES_MAX, LEASE_S
from p2pdiloco_daemon.storage.replica import pack_state

MINUTE = 60.0


def assert_one_lineage(swarm: Swarm) -> None:
    digests = [living.digests for living in swarm.nodes.values()]
    assert all(other == digests[0] for other in digests), digests


def assert_ledgers_add_up(swarm: Swarm) -> None:
    for living in swarm.nodes.values():
        totals = living.node.state.ledger.totals()
        fates = [totals.merged, totals.pending, *totals.rejected.values(), *totals.lost.values()]
        assert totals.processed == sum(fates) > 0


def test_three_nodes_train_to_the_same_bits(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(3 * MINUTE)
        await swarm.settle()
        assert_one_lineage(swarm)
        assert_ledgers_add_up(swarm)
        assert min(swarm.versions()) >= 40
        assert swarm.nodes[A].distance < 0.3
        together = [r for r in swarm.nodes[A].node.state.rounds if len(r.contributors) == 3]
        assert len(together) >= 18

    play_swarm(tmp_path, scenario)


def test_a_killed_node_comes_back_from_its_directory(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE)
        tokens = swarm.nodes[B].node.state.ledger.totals().processed
        left_at = swarm.nodes[B].versions
        await swarm.kill(B)
        await swarm.train(MINUTE)
        assert min(swarm.nodes[A].versions) > max(left_at) + 5
        swarm.network.shelves.pop(BOOT)
        swarm.start(B)
        await swarm.train(MINUTE)
        await swarm.settle()
        assert_one_lineage(swarm)
        assert_ledgers_add_up(swarm)
        assert swarm.nodes[B].node.state.ledger.totals().processed > 1.5 * tokens

    play_swarm(tmp_path, scenario)


def test_all_nodes_die_and_any_subset_goes_on_from_the_newest_anchors(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(MINUTE)
        committed = swarm.versions()
        await swarm.kill(A, B, C)
        swarm.network.shelves.pop(BOOT)
        swarm.start(B, C)
        await swarm.train(1)
        assert swarm.versions() >= [v - 1 for v in committed]
        await swarm.train(MINUTE)
        swarm.start(A)
        await swarm.train(MINUTE / 2)
        await swarm.settle()
        assert_one_lineage(swarm)
        assert_ledgers_add_up(swarm)
        assert min(swarm.versions()) > max(committed) + 10

    play_swarm(tmp_path, scenario)


def test_a_joiner_ends_at_the_head(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE)
        swarm.network.shelves.pop(BOOT)
        swarm.start(C)
        await swarm.train(5)
        behind = [a - c for a, c in zip(swarm.versions(), swarm.nodes[C].versions, strict=True)]
        assert max(behind) <= 1
        await swarm.train(MINUTE / 2)
        await swarm.settle()
        assert_one_lineage(swarm)
        assert swarm.nodes[C].node.state.ledger.totals().merged > 0

    play_swarm(tmp_path, scenario)


def test_a_hung_peer_stalls_nobody(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(MINUTE)
        before = swarm.nodes[A].versions
        swarm.network.hung.add(C)
        await swarm.train(MINUTE)
        assert min(a - b for a, b in zip(swarm.nodes[A].versions, before, strict=True)) > 8
        swarm.network.hung.clear()
        await swarm.train(MINUTE)
        await swarm.settle()
        assert_one_lineage(swarm)
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario)


# -------------------------------------------------------------------- slow links, wrong memory


@pytest.mark.timeout(300)
def test_a_joiner_whose_link_takes_fifty_merges_for_a_fragment_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donors keep what it reads, and the merges after that, and no longer."""
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 24)
    packed = [len(pack_state(state)) for state in GENESIS]
    num_chunks = sum(-(-size // 24) for size in packed)

    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE / 3)
        swarm.network.shelves.pop(BOOT)
        before = swarm.versions()
        swarm.network.state_chunk_s[C] = 70.0
        swarm.start(C)
        while min(swarm.nodes[C].versions if C in swarm.nodes else [-1]) < 0:
            await swarm.train(1)
        passed = [a - b for a, b in zip(swarm.versions(), before, strict=True)]
        assert max(passed) > 50
        await swarm.train(10)
        behind = [a - c for a, c in zip(swarm.versions(), swarm.nodes[C].versions, strict=True)]
        assert max(behind) <= 1
        assert swarm.network.state_chunks[C] <= 1.5 * num_chunks, "nothing was begun anew"
        merges = [n.holdings.store._versions(0, "merge") for n in swarm.nodes.values()]
        assert max(map(len, merges)) <= LEASE_MERGES_MAX + 8
        await swarm.train(LEASE_S + 15)
        merges = [n.holdings.store._versions(0, "merge") for n in swarm.nodes.values()]
        assert max(map(len, merges)) <= 8
        await swarm.settle()
        assert_one_lineage(swarm)

    play_swarm(tmp_path, scenario)


def test_a_node_whose_memory_went_wrong_is_healed_before_anybody_builds_on_it(
    tmp_path: Path,
) -> None:
    """The synchronizer of a fragment, while it is the synchronizer, for each fragment in turn."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(MINUTE)
        for p in range(3):
            state = swarm.nodes[A].node.state
            victim = state.post(state.registers[p])[0]
            assert victim
            register = swarm.nodes[victim].node.state.registers[p]
            rot(swarm.nodes[victim].holdings.replica.state(p))
            await swarm.train(10)
            assert (register.damaged, register.distrusted) == (1, False), (p, register)
            told = [text for _, text in swarm.nodes[victim].shell.notes]
            assert any(f"fragment {p} v" in t and "damaged in memory" in t for t in told)
        await swarm.train(MINUTE)
        await swarm.settle()
        assert_one_lineage(swarm)
        assert_ledgers_add_up(swarm)
        for living in swarm.nodes.values():
            assert not [r for r in living.node.state.refusals if "diverged" in r]
            for register in living.node.state.registers:
                assert register.doubted is register.disbelieved is None

    play_swarm(tmp_path, scenario)


def test_a_node_alone_heals_from_its_own_disk(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A)
        await swarm.train(MINUTE)
        swarm.network.shelves.pop(BOOT)
        before = swarm.versions()
        for p in range(3):
            rot(swarm.nodes[A].holdings.replica.state(p))
        await swarm.train(MINUTE / 2)
        registers = swarm.nodes[A].node.state.registers
        assert all((r.damaged, r.distrusted) == (1, False) for r in registers)
        assert all(a > b + 1 for a, b in zip(swarm.versions(), before, strict=True))
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario)
