from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_builders import (
    RUN,
    A,
    B,
    C,
    FakeSigner,
    make_chain,
    make_record,
    make_records,
    signed,
)

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.lineage import (
    CONTRIBUTORS_MAX,
    RECORD_BYTES_MAX,
    RECORDS_KEPT,
    Chain,
    Record,
    Refused,
    Verdict,
    check_links,
    check_record,
    unpack_record,
)
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.wire import MESSAGE_BYTES_MAX

SIGNER = FakeSigner(A)


def check(record: Record) -> None:
    check_record(record, RUN, SIGNER)


# -------------------------------------------------------------------- records


def test_a_record_survives_packing_with_its_digest() -> None:
    record = make_record(refused=(Refused(A, "late: the round had closed"),))
    assert unpack_record(record.pack()) == record
    assert unpack_record(record.pack()).digest == record.digest


def test_the_cached_digest_is_no_part_of_what_is_packed() -> None:
    fresh, used = make_record(), make_record()
    assert used.digest and used.signed_part
    assert (fresh.pack(), fresh) == (used.pack(), used)


def test_the_digest_covers_everything_but_the_signature() -> None:
    record = make_record()
    assert replace(record, signature=b"other").digest == record.digest
    assert replace(record, tokens_total=201).digest != record.digest


def test_a_record_knows_what_became_of_a_peer() -> None:
    record = make_record(tokens={A: 70, B: 30}, refused=(Refused(C, "a NaN"),))
    assert (record.tokens, record.tokens_of(A), record.tokens_of(C)) == (100, 70, 0)
    assert (record.refusal_of(C), record.refusal_of(A)) == ("a NaN", None)


@pytest.mark.parametrize(
    "change",
    [
        {"contributors": ()},
        {"contributors": make_record().contributors * CONTRIBUTORS_MAX},
        {"version": 0},
        {"payload_digest": "short"},
        {"payload_bytes": 0},
        {"tokens_total": 2**63},
        {"reason": "r" * 201},
        {"signature": b"s" * 129},
        {"synchronizer": ""},
    ],
    ids=str,
)
def test_a_record_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="not a merge record"):
        unpack_record(replace(make_record(), **change).pack())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=100))
def test_random_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(PeerError):
        unpack_record(data)


def test_a_record_that_is_too_long_is_not_read() -> None:
    with pytest.raises(PeerError, match="at most 32768"):
        unpack_record(bytes(RECORD_BYTES_MAX + 1))


def test_a_record_that_could_not_be_read_back_is_refused() -> None:
    """It comes in a message too, which is longer than a record may be."""
    refused = tuple(Refused(PeerId(f"peer{k}"), "\N{FIRE}" * 200) for k in range(50))
    record = make_record(refused=refused)
    assert RECORD_BYTES_MAX < len(record.pack()) < MESSAGE_BYTES_MAX
    with pytest.raises(PeerError, match="at most 32768"):
        check(record)


def test_a_record_of_this_run_signed_by_its_synchronizer_passes() -> None:
    check(make_record())


def test_a_record_with_a_bad_signature_is_refused() -> None:
    with pytest.raises(PeerError, match="signature"):
        check(replace(make_record(), tokens_total=10**6))


def test_a_record_signed_by_somebody_else_is_refused() -> None:
    with pytest.raises(PeerError, match="signature"):
        check(replace(make_record(), signature=FakeSigner(C).sign(make_record().signed_part)))


def test_a_record_of_another_run_is_refused() -> None:
    with pytest.raises(PeerError, match="another run"):
        check(make_record(run_id="other"))


# -------------------------------------------------------------------- links


def test_records_that_follow_each_other_pass() -> None:
    check_links(make_records(3), 0, check)


def test_a_broken_link_is_refused() -> None:
    first, second, third = make_records(3)
    for broken in ([first, third], [second, first], [first, make_record(make_record(branch="x"))]):
        with pytest.raises(PeerError, match="does not follow"):
            check_links(broken, 0, check)


def test_tokens_that_do_not_add_up_are_refused() -> None:
    first = make_record()
    inflated = make_record(first, tokens_total=10**9)
    with pytest.raises(PeerError, match="does not follow"):
        check_links([first, inflated], 0, check)


def test_a_first_record_with_an_inflated_total_is_refused() -> None:
    with pytest.raises(PeerError, match="does not add up"):
        check_links([make_record(tokens_total=10**9)], 0, check)


def test_records_of_another_fragment_are_refused() -> None:
    with pytest.raises(PeerError, match="asked for fragment 0"):
        check_links(make_records(1, fragment=1), 0, check)


# -------------------------------------------------------------------- chains


def test_a_chain_stands_on_its_newest_record() -> None:
    records = make_records(3)
    chain = make_chain(records)
    assert (chain.version, chain.digest, chain.head) == (3, records[2].digest, records[2])
    assert chain.weight == records[2].weight
    assert chain.record(2) == records[1]
    assert (chain.record(0), chain.record(4)) == (None, None)


def test_an_empty_chain_stands_on_genesis() -> None:
    chain = make_chain()
    assert (chain.version, chain.head, chain.weight) == (0, None, (0, 0))
    assert chain.digest_at(0) == chain.digest


def test_a_chain_keeps_its_newest_records_only() -> None:
    records = make_records(RECORDS_KEPT + 2)
    chain = make_chain()
    for record in records:
        chain.append(record)
    assert (len(chain.records), chain.base, chain.version) == (RECORDS_KEPT, 2, RECORDS_KEPT + 2)
    assert chain.base_digest == records[1].digest


def test_a_record_that_does_not_follow_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        make_chain().append(make_records(2)[1])


def test_a_chain_judges_a_record() -> None:
    ours = make_records(3)
    chain = make_chain(ours)
    light = make_record(ours[1], {B: 1}, branch="light")
    heavy = make_record(ours[1], {B: 900}, branch="heavy")
    assert chain.judge(ours[1]) is Verdict.KNOWN
    assert chain.judge(make_record(ours[2])) is Verdict.EXTENDS
    assert chain.judge(make_records(2, ours[2])[1]) is Verdict.AHEAD
    assert chain.judge(light) is Verdict.LIGHTER
    assert chain.judge(heavy) is Verdict.HEAVIER


def test_of_two_equal_siblings_the_smaller_digest_wins() -> None:
    one, other = sorted((make_record(branch="x"), make_record(branch="y")), key=lambda r: r.digest)
    assert one.weight > other.weight
    assert make_chain([one]).judge(other) is Verdict.LIGHTER
    assert make_chain([other]).judge(one) is Verdict.HEAVIER


def test_chains_agree_up_to_the_fork() -> None:
    trunk = make_records(3)
    chain = make_chain([*trunk, *make_records(2, trunk[-1], branch="ours")])
    theirs = make_records(2, trunk[-1], branch="theirs")
    assert chain.common_version([*trunk[1:], *theirs]) == 3
    assert chain.common_version(theirs) == 3
    assert chain.common_version(theirs[1:]) is None
    assert chain.common_version(make_records(2, branch="alien")) == 0
    assert Chain(7, "f" * 64).common_version(theirs) is None


def test_signing_again_changes_nothing() -> None:
    record = make_record()
    assert signed(record) == record
