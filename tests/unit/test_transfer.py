import pytest
from protocol_builders import GENESIS, make_chain, make_record, make_records

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import Chain, Record
from p2pdiloco.protocol.transfer import Plan, adopted_chain, plan_catch_up

RECORDS = make_records(6)
ZERO = SnapshotInfo(0, GENESIS[0])


def snapshot(record: Record) -> SnapshotInfo:
    return SnapshotInfo(record.version, record.state_digest)


def plan(
    chain: Chain | None,
    records: list[Record],
    *snapshots: SnapshotInfo,
    replay: bool = True,
    distrusted: bool = False,
    begun: SnapshotInfo | None = None,
) -> Plan | None:
    return plan_catch_up(
        chain,
        records,
        snapshots,
        GENESIS[0],
        0,
        replay=replay,
        distrusted=distrusted,
        begun=begun,
    )


def test_a_joiner_loads_the_newest_snapshot_and_replays_the_rest() -> None:
    snapshots = (ZERO, snapshot(RECORDS[1]), snapshot(RECORDS[3]))
    assert plan(None, RECORDS, *snapshots) == (snapshots[2], tuple(RECORDS[4:]))


def test_a_snapshot_that_was_begun_is_fetched_to_its_end_while_it_is_on_offer() -> None:
    older, newer = snapshot(RECORDS[1]), snapshot(RECORDS[3])
    assert plan(None, RECORDS, newer, older, begun=older) == (older, tuple(RECORDS[2:]))
    assert plan(None, RECORDS, newer, begun=older) == (newer, tuple(RECORDS[4:]))
    lie = SnapshotInfo(2, "f" * 64)
    assert plan(None, RECORDS, newer, lie, begun=lie) == (newer, tuple(RECORDS[4:]))


def test_a_joiner_of_a_fresh_run_loads_the_genesis_weights() -> None:
    assert plan(None, [], ZERO) == (ZERO, ())
    assert plan(None, RECORDS, ZERO) == (ZERO, tuple(RECORDS))


def test_a_node_that_is_behind_replays_what_it_missed() -> None:
    assert plan(make_chain(RECORDS[:4]), RECORDS[4:], ZERO) == (None, tuple(RECORDS[4:]))
    assert plan(make_chain(RECORDS[:4]), RECORDS[2:], ZERO) == (None, tuple(RECORDS[4:]))
    assert plan(make_chain(), RECORDS, ZERO) == (None, tuple(RECORDS))


def test_a_node_that_cannot_have_the_payloads_loads_a_snapshot() -> None:
    chain, newest = make_chain(RECORDS[:2]), snapshot(RECORDS[4])
    assert plan(chain, RECORDS[2:], newest) == (None, tuple(RECORDS[2:]))
    assert plan(chain, RECORDS[2:], newest, replay=False) == (newest, (RECORDS[5],))


def test_a_snapshot_older_than_ours_replaces_no_replay() -> None:
    chain = make_chain(RECORDS[:4])
    assert plan(chain, RECORDS, snapshot(RECORDS[3]), replay=False) == (None, tuple(RECORDS[4:]))


def test_a_donor_with_nothing_heavier_is_of_no_use() -> None:
    assert plan(make_chain(RECORDS), [], ZERO) is None
    assert plan(make_chain(RECORDS), RECORDS[:5], ZERO) is None
    assert plan(make_chain(RECORDS), RECORDS, ZERO) is None


def test_a_node_on_another_lineage_loads_a_snapshot() -> None:
    ours = make_chain(make_records(3, branch="ours"))
    assert plan(ours, RECORDS, snapshot(RECORDS[3])) == (
        snapshot(RECORDS[3]),
        tuple(RECORDS[4:]),
    )


@pytest.mark.parametrize(
    "claimed",
    [
        SnapshotInfo(0, "f" * 64),
        SnapshotInfo(4, "f" * 64),
        SnapshotInfo(9, RECORDS[3].state_digest),
    ],
    ids=str,
)
def test_a_snapshot_that_nothing_vouches_for_is_refused(claimed: SnapshotInfo) -> None:
    with pytest.raises(PeerError, match="no snapshot that its 6 records"):
        plan(None, RECORDS, claimed)


def test_records_that_do_not_start_at_genesis_do_not_vouch_for_it() -> None:
    with pytest.raises(PeerError):
        plan(None, RECORDS[1:], ZERO)
    with pytest.raises(PeerError):
        plan(None, make_records(2, fragment=1), ZERO)


def test_the_adopted_chain_of_a_fresh_run_is_empty() -> None:
    assert adopted_chain(None, [], 0, GENESIS[0]) == Chain(0, GENESIS[0])


def test_the_adopted_chain_goes_up_to_the_snapshot() -> None:
    chain = adopted_chain(None, RECORDS[2:], 4, GENESIS[0])
    assert (chain.base, chain.base_digest) == (2, RECORDS[1].digest)
    assert chain.records == RECORDS[2:4]


def test_older_records_stay_if_they_connect() -> None:
    chain = adopted_chain(make_chain(RECORDS[:3]), RECORDS[2:], 5, GENESIS[0])
    assert (chain.base, chain.records) == (0, RECORDS[:5])


def test_older_records_of_another_lineage_go() -> None:
    ours = make_chain(make_records(3, branch="ours"))
    assert adopted_chain(ours, RECORDS[2:], 5, GENESIS[0]).records == RECORDS[2:5]


def test_a_distrusted_state_is_replaced_by_an_equal_one_but_not_by_a_lighter() -> None:
    chain, newest = make_chain(RECORDS[:4]), snapshot(RECORDS[1])
    assert plan(chain, RECORDS[:4], newest, distrusted=True) == (newest, tuple(RECORDS[2:4]))
    assert plan(chain, RECORDS[:3], newest, distrusted=True) is None
    assert plan(make_chain(), [], ZERO, distrusted=True) == (ZERO, ())


def test_inflated_totals_are_not_followed() -> None:
    inflated = make_record(RECORDS[3], tokens_total=10**9)
    with pytest.raises(PeerError, match="does not add up"):
        plan(make_chain(RECORDS[:4]), [inflated], ZERO)
