"""Real shells train in virtual time: they agree to the last bit, and survive deaths."""

from pathlib import Path

from memory_swarm import BOOT, A, B, C, Swarm, play_swarm

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
