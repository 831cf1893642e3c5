"""How the next merge spreads through a swarm too large for its synchronizer to serve everybody."""

from protocol_builders import (
    B,
    C,
    Script,
    committed,
    head_of,
    make_record,
    make_records,
    training,
)

from p2pdiloco.protocol import events
from p2pdiloco.protocol.actions import Action, CatchUp, FetchRecords, Send
from p2pdiloco.protocol.follower import DONORS_MAX, MAKER_NEWS_S, NEWS_S
from p2pdiloco.protocol.membership import ALL_TO_ALL_MAX, FANOUT
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.wire import Committed

CROWD = tuple(PeerId(f"peer{i:02d}") for i in range(ALL_TO_ALL_MAX + 6))
NEXT = make_record(synchronizer=CROWD[0])
HEADS = (head_of(NEXT), head_of(None, 1))


def crowd() -> Script:
    """A node in a large swarm, some time after its first heartbeats."""
    script = training(*CROWD)
    script.now = 1.0
    return script


def told(done: list[Action]) -> set[PeerId]:
    return {a.peer for a in done if isinstance(a, Send) and a.message == Committed(NEXT)}


def asked(done: list[Action]) -> list[FetchRecords]:
    return [a for a in done if isinstance(a, FetchRecords)]


def reached(script: Script) -> list[Action]:
    return script.do(events.StateReached(0, 1, NEXT.state_digest, NEXT))


def maker_and_another(script: Script) -> tuple[PeerId, PeerId]:
    """The synchronizer of the next merge, as everybody knows, and somebody else."""
    maker = script.node.state.post(script.node.state.registers[0])[0]
    assert maker
    return maker, next(peer for peer in CROWD if peer != maker)


def test_a_record_is_passed_on_by_those_who_have_its_payload() -> None:
    script = crowd()
    first = script.do(committed(CROWD[5], NEXT))
    assert isinstance(first[-1], CatchUp) and not told(first)
    others = told(reached(script))
    assert 1 <= len(others) <= FANOUT and not others & {CROWD[0], CROWD[5]}


def test_in_a_small_swarm_nothing_is_passed_on() -> None:
    script = training(B, C)
    script.do(committed(B, NEXT))
    assert not told(reached(script))


def test_the_one_who_told_us_is_asked_first_and_the_synchronizer_last() -> None:
    script = crowd()
    script.beat(*CROWD[6:9], heads=HEADS)
    (catch_up,) = [a for a in script.do(committed(CROWD[5], NEXT)) if isinstance(a, CatchUp)]
    teller, *holders, maker, _ = catch_up.donors
    assert (teller, maker) == (CROWD[5], CROWD[0])
    assert set(holders) == set(CROWD[6:9])
    assert len(catch_up.donors) <= DONORS_MAX


def test_whoever_hears_of_the_next_version_waits_to_be_told() -> None:
    script = crowd()
    maker, other = maker_and_another(script)
    assert not asked(script.beat(other, maker, heads=HEADS))
    script.now += NEWS_S + 0.1
    assert not asked(script.beat(maker, heads=HEADS)), "it has enough to serve"
    assert asked(script.beat(other, heads=HEADS)) == [FetchRecords(other, 0, 0)]


def test_in_the_end_the_synchronizer_itself_is_asked() -> None:
    script = crowd()
    maker, other = maker_and_another(script)
    script.beat(other, heads=HEADS)
    script.now += MAKER_NEWS_S + 0.1
    assert asked(script.beat(maker, heads=HEADS)) == [FetchRecords(maker, 0, 0)]


def test_who_is_further_behind_asks_at_once() -> None:
    script = crowd()
    ahead = (head_of(make_records(2)[-1]), head_of(None, 1))
    assert asked(script.beat(CROWD[3], heads=ahead)) == [FetchRecords(CROWD[3], 0, 0)]
