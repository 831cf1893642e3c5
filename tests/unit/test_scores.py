"""Which pair of turn and replica comes first, and what a replica is believed to have."""

from collections import deque
from dataclasses import replace

import pytest
from placement_builders import ALICE, BOB, load

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.replicas import Need, PrefixMemory, Replica
from p2pdiloco.protocol.scores import Candidate, Order, Swarm, War, pairs


def need(trajectory: int, num_tokens: int = 100, *, group: int = 0, turns_left: float = 4) -> Need:
    return Need(trajectory, group, 100, num_tokens, 20.0, turns_left)


def candidate(
    of: Need, *, home: PeerId | None = None, turns: float = 4.0, overdue_s: float = 0.0
) -> Candidate:
    return Candidate(of, home, turns, overdue_s)


def replica(name: PeerId = ALICE, *, rows: int = 4, cache: int = 1000) -> Replica:
    return Replica(name, load(rows=rows, cache=cache), 0.01)


def swarm(order: Order = "by use") -> Swarm:
    return Swarm(order, [replica()], 1, 0.0)


def test_war_s_terms_outweigh_each_other_in_the_paper_s_order() -> None:
    here = replica()
    here.holds(need(1, 400))
    best_to_worst = [
        candidate(need(2, group=5), turns=30, overdue_s=1.0),
        candidate(need(3, group=5), turns=2),
        candidate(need(1, 400), turns=3),
        candidate(need(4, 400), turns=3),
        candidate(need(5, group=5), turns=3),
    ]
    ranks = [War().rank(c, here) for c in best_to_worst]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(ranks)


def test_war_prefers_the_replica_with_less_to_do() -> None:
    idle, busy = replica(ALICE), replica(BOB)
    busy.place(need(9), 0, 0.0)
    idle.holds(need(8))
    assert War().rank(candidate(need(1)), idle) > War().rank(candidate(need(1)), busy)


def test_the_swarm_resumes_first_then_takes_from_others_then_begins() -> None:
    here = replica()
    here.holds(need(1, 400))
    resumed, new = candidate(need(1, 400), home=ALICE), candidate(need(2))
    foreign = candidate(need(3, 400), home=BOB)
    overdue = candidate(need(4, 400), home=BOB, overdue_s=61.0)
    ranks = [swarm().rank(c, here) for c in (overdue, resumed, foreign, new)]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize(
    ("order", "used", "short_first"),
    [
        ("short first", 0, True),
        ("long first", 800, False),
        ("by use", 0, False),
        ("by use", 800, True),
    ],
)
def test_short_ones_go_first_where_the_order_or_the_cache_says_so(
    order: Order, used: int, short_first: bool
) -> None:
    here = replica()
    if used:
        here.place(need(9, used, group=3), 0, 0.0)
    rank = swarm(order).rank
    short, long = candidate(need(1, turns_left=2)), candidate(need(2, turns_left=9))
    assert (rank(short, here) > rank(long, here)) is short_first


def test_pairs_end_when_no_replica_has_a_place() -> None:
    replicas = [replica(ALICE, rows=2), replica(BOB, rows=1)]
    queues = [deque(candidate(need(i)) for i in range(9))]
    form = Swarm("by use", replicas, 9, 0.0)
    placed = []
    for chosen, where in pairs(queues, replicas, form, [0], {ALICE, BOB}):
        where.place(chosen.need, 0, 0.0)
        placed.append((chosen.need.trajectory, where.name))
    assert sorted(name for _index, name in placed) == [ALICE, ALICE, BOB]
    assert [index for index, _name in placed] == [0, 1, 2]


def test_only_what_is_new_is_looked_at() -> None:
    replicas = [replica(ALICE), replica(BOB)]
    queues = [deque([candidate(need(0))]), deque([candidate(need(1))])]
    form = Swarm("by use", replicas, 2, 0.0)
    assert list(pairs(queues, replicas, form, [], set())) == []
    chosen, _where = next(pairs(queues, replicas, form, [1], set()))
    assert chosen.need.trajectory == 1


def test_a_prefix_is_forgotten_when_younger_ones_need_the_room() -> None:
    memory = PrefixMemory()
    memory.keep(need(1, 300), capacity=500)
    memory.keep(need(2, 300), capacity=500)
    assert (memory.num_cached(need(1, 320)), memory.num_cached(need(2, 320))) == (300, 300)
    memory.keep(need(3, 250), capacity=500)
    assert (memory.num_cached(need(1, 320)), memory.num_cached(need(2, 320))) == (100, 300)
    memory.forget(2)
    assert memory.num_cached(need(2, 320)) == 100


def test_a_group_s_prompt_counts_once_in_what_is_used() -> None:
    here = replica()
    here.place(need(1), 0, 0.0)
    here.place(need(2), 0, 0.0)
    assert here.use == pytest.approx((100 + 2 * 20) / 1000)
    here.finished(need(1, 130), 0, 4)
    assert here.use == pytest.approx((100 + 2 * 20 + 30) / 1000)
    here.left(1, 1.0)
    here.left(2, 1.0)
    assert here.use == 0
    assert here.num_free == 4


def test_speed_is_linear_between_what_was_measured_and_proportional_beyond() -> None:
    here = replica()
    table = ((1, 0.01), (4, 0.02), (16, 0.05))
    here.reported(replace(here.load, token_s=table), 0.01)
    assert [here.token_s(b) for b in (1, 2, 4, 10, 32)] == pytest.approx(
        [0.01, 0.01 + 0.01 / 3, 0.02, 0.035, 0.1]
    )
