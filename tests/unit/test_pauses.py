from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.pauses import FORGIVEN_AFTER_S, PAUSES_MAX, Pauses, backoff_s

A = PeerId("anna")


def test_each_further_pause_is_twice_as_long_up_to_a_bound() -> None:
    pauses, now, lengths = Pauses(30, 100), 0.0, []
    for _ in range(4):
        lengths.append(pauses.begin(A, now))
        now += lengths[-1]
    assert lengths == [30, 60, 100, 100]


def test_a_pause_under_way_is_not_made_longer() -> None:
    pauses = Pauses(30, 100)
    pauses.begin(A, 0)
    assert pauses.begin(A, 10) == 20
    assert (pauses.over(A, 29), pauses.over(A, 30)) == (False, True)
    assert pauses.count(A) == 1


def test_who_was_good_for_long_begins_anew() -> None:
    pauses = Pauses(30, 100)
    pauses.begin(A, 0)
    pauses.begin(A, 30)
    assert pauses.begin(A, 91 + FORGIVEN_AFTER_S) == 30


def test_a_forgiven_peer_is_as_good_as_new() -> None:
    pauses = Pauses(30, 100)
    pauses.begin(A, 0)
    pauses.forgive(A)
    assert pauses.over(A, 1)
    assert pauses.begin(A, 1) == 30


def test_a_flood_of_names_takes_bounded_memory() -> None:
    pauses = Pauses(30, 100)
    for i in range(PAUSES_MAX + 10):
        pauses.begin(PeerId(f"peer{i}"), float(i) / 1000)
    assert len(pauses) == PAUSES_MAX
    assert pauses.over(PeerId("peer0"), 2.0)
    assert not pauses.over(PeerId(f"peer{PAUSES_MAX + 9}"), 2.0)


def test_thousands_of_failures_in_a_row_do_not_overflow() -> None:
    assert backoff_s(0.5, 10_000, 15.0) == 15.0
