"""The promises bite: with a bug planted in the core, some seed among a few breaks the one that it
should.
"""

from collections.abc import Callable

import pytest

from p2pdiloco.protocol import contributor, election
from p2pdiloco.protocol.follower import Follower
from p2pdiloco.protocol.ledger import Ledger
from p2pdiloco.protocol.lineage import Chain, Record
from p2pdiloco.protocol.membership import ALL_TO_ALL_MAX
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.round import Round
from p2pdiloco.protocol.state import NodeState
from p2pdiloco.protocol.synchronizer import Synchronizer
from p2pdiloco.protocol.wire import Head, RoundOpened
from p2pdiloco.simulation import disk
from p2pdiloco.simulation.checkers import PromiseBroken
from p2pdiloco.simulation.network import HOME_LINKS, Quality
from p2pdiloco.simulation.trial import run_trial
from p2pdiloco.simulation.world import Swarm, World

SEEDS = range(40)
SPREAD_S = 4.0
"""What `test_trials.py` allows."""

Plant = Callable[[pytest.MonkeyPatch], None]


def any_lineage_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chain, "weight", property(lambda chain: (-1, 0)))
    patch.setattr(Register, "gains_from_head", _differs)


def _differs(register: Register, head: Head) -> bool:
    return head.version >= 0 and (register.chain is None or head.digest != register.chain.digest)


def lighter_lineage_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Record, "weight", property(lambda record: (2**50 - record.tokens_total, 0)))


def nothing_is_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contributor, "_settle", lambda *_: None)


def lost_branches_stay_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "revise", lambda *_: None)


def fences_are_ignored(patch: pytest.MonkeyPatch) -> None:
    judged = contributor._why_not

    def why_not(
        node: NodeState, register: Register, sender: str, message: RoundOpened
    ) -> str | None:
        register.fence, register.offer = (0, 0), None
        return judged(node, register, sender, message)  # type: ignore[arg-type]

    patch.setattr(contributor, "_why_not", why_not)


def the_learner_receives_twice(patch: pytest.MonkeyPatch) -> None:
    handed = contributor.hand_over

    def hand_over(node: NodeState, register: Register) -> None:
        handed(node, register)
        register.handed = None

    patch.setattr(contributor, "hand_over", hand_over)


def rounds_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Round, "decide", lambda *_: (None, "waiting for everybody, for ever"))


def nobody_looks_at_heads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Follower, "heartbeat", lambda *_: None)


def a_restart_forgets_the_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "_resume_ledger", lambda *_: None)


def rounds_leave_their_bytes(patch: pytest.MonkeyPatch) -> None:
    def give_up(_: Synchronizer, register: Register, reason: str) -> None:
        register.round = None

    patch.setattr(Synchronizer, "give_up", give_up)


def the_disk_keeps_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk, "SNAPSHOTS_KEPT", 100)


@pytest.mark.parametrize(
    ("plant", "promise"),
    [
        (any_lineage_wins, "is not heavier|has seen the fence"),
        (lighter_lineage_wins, "another lineage|is not heavier|different heads"),
        (nothing_is_settled, "the learner counted"),
        (lost_branches_stay_merged, "its ledger says"),
        (fences_are_ignored, "has seen the fence"),
        (the_learner_receives_twice, "twice"),
        (rounds_never_end, "did not deal with its deadline"),
        (nobody_looks_at_heads, "was not merged since|is still missing|another lineage"),
        (a_restart_forgets_the_ledger, "its ledger says"),
        (rounds_leave_their_bytes, "rounds with outer gradients"),
        (the_disk_keeps_everything, "are on disk"),
    ],
)
def test_a_planted_bug_is_caught(
    plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(PromiseBroken, match=promise) as caught:
        for seed in SEEDS:
            run_trial(seed)
    assert "python -m p2pdiloco.simulation" in str(caught.value)


def test_records_that_are_not_passed_on_spread_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "_forward", lambda *_: None)
    world = World(1, Swarm(num_machines=24, network=Quality(), step_spread=0.1))
    world.start_all()
    world.run(until=12.0)
    world.checkers.slowest_spread_s = 0.0
    world.run(until=40.0)
    assert world.checkers.slowest_spread_s > SPREAD_S


def test_a_maker_that_everybody_asks_first_serves_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = Follower._donors

    def maker_first(
        follower: Follower, register: Register, source: PeerId, target: Record | None
    ) -> tuple[PeerId, ...]:
        first = target.synchronizer if target else source
        return tuple(dict.fromkeys([first, *donors(follower, register, source, target)]))

    monkeypatch.setattr(Follower, "_donors", maker_first)
    swarm = Swarm(
        num_machines=16, num_fragments=1, inner_steps=20, links=HOME_LINKS, payload_bytes=10**6
    )
    world = World(1, swarm)
    world.start_all()
    world.run(until=20.0)
    world.errands.copies.clear()
    world.run(until=40.0)
    with pytest.raises(PromiseBroken, match="copies of a merge"):
        world.checkers.spared_uplinks(copies_max=ALL_TO_ALL_MAX)


def test_one_who_synchronizes_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "_key", lambda run_id, term, peer, weight: (0.0, peer))
    world = World(1, Swarm(num_machines=3, num_fragments=2, term_merges=1, inner_steps=3))
    world.start_all()
    world.run(until=40.0)
    with pytest.raises(PromiseBroken, match="are its share"):
        world.checkers.took_turns(tolerance=0.4)


def test_a_broken_promise_names_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_settled(monkeypatch)
    with pytest.raises(PromiseBroken) as caught:
        for seed in SEEDS:
            run_trial(seed)
    assert f"seed {seed}, " in str(caught.value)
    assert f"python -m p2pdiloco.simulation {seed}" in str(caught.value)
