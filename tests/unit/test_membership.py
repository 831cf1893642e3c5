import itertools
import random

import pytest
from protocol_builders import A, B, C, D, make_heartbeat

from p2pdiloco.protocol import membership
from p2pdiloco.protocol.membership import (
    ALL_TO_ALL_MAX,
    FANOUT,
    FORGET_S,
    HEARSAY_MAX,
    HEARTBEAT_S,
    MEMBERS_MAX,
    SIGHTINGS_MIN,
    SUSPECT_MAX_S,
    SUSPECT_MIN_S,
    UNHURRIED_MEMBERS,
    VOICES_MAX,
    Membership,
)
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.wire import SIGHTINGS_MAX, Sighting


def view(*heard: PeerId) -> Membership:
    """Of A, who has heard of these at time 0."""
    members = Membership(A)
    for peer in heard:
        members.heard(peer, make_heartbeat(1), 0)
    return members


def listen(members: Membership, peer: PeerId, every_s: float, times: int) -> float:
    """Heartbeats at regular intervals from 0 on; returns the time of the last."""
    for i in range(1, times + 1):
        members.heard(peer, make_heartbeat(1 + i), i * every_s)
    return times * every_s


def living(members: Membership, now: float) -> list[PeerId]:
    return [m.peer for m in members.alive(now)]


def crowd(num: int) -> list[PeerId]:
    return [PeerId(f"peer{i:04d}") for i in range(num)]


# -------------------------------------------------------------------- liveness


def test_a_member_lives_from_its_first_heartbeat() -> None:
    members = Membership(A)
    members.meet(B, 0)
    assert living(members, 0) == []
    members.heard(B, make_heartbeat(), 0)
    assert living(members, 0) == [B]


def test_a_silent_member_is_suspected() -> None:
    members = view(B)
    last = listen(members, B, HEARTBEAT_S, 20)
    assert members.is_alive(B, last + SUSPECT_MIN_S)
    assert not members.is_alive(B, last + SUSPECT_MIN_S + 0.1)


def test_suspicion_adapts_to_the_interval_of_the_news() -> None:
    members = view(B)
    last = listen(members, B, 4 * HEARTBEAT_S, 30)
    assert members.is_alive(B, last + 4)
    assert not members.is_alive(B, last + 6)


def test_that_a_member_was_away_makes_its_next_death_no_slower_to_notice() -> None:
    members = view(B)
    returned = listen(members, B, HEARTBEAT_S, 20) + 18
    members.heard(B, make_heartbeat(1, incarnation=2), returned)
    members.heard(B, make_heartbeat(2, incarnation=2), returned + HEARTBEAT_S)
    assert not members.is_alive(B, returned + HEARTBEAT_S + SUSPECT_MIN_S + 0.1)


def test_patience_has_a_bound() -> None:
    members = view(B)
    last = listen(members, B, 100.0, 10)
    assert not members.is_alive(B, last + SUSPECT_MAX_S + 0.1)


def test_this_node_is_always_alive_and_never_a_member() -> None:
    members = view(A)
    assert members.is_alive(A, 1e9)
    assert members.members == {}


def test_old_heartbeats_are_no_news() -> None:
    members = view()
    assert members.heard(B, make_heartbeat(5), 0)
    assert not members.heard(B, make_heartbeat(5), 1)
    assert not members.heard(B, make_heartbeat(4), 1)
    assert members.members[B].last_news == 0


# -------------------------------------------------------------------- gossip


def test_news_of_others_keeps_them_alive() -> None:
    members = view(B)
    members.heard(C, make_heartbeat(1, sightings=(Sighting(B, 1, 9), Sighting(D, 1, 1))), 10)
    assert living(members, 10) == [B, C, D]


def test_old_news_of_others_is_ignored() -> None:
    members = view(B)
    members.heard(C, make_heartbeat(1, sightings=(Sighting(B, 1, 1),)), 10)
    assert living(members, 10) == [C]


def test_gossip_about_ourselves_is_ignored() -> None:
    members = view()
    members.heard(C, make_heartbeat(1, sightings=(Sighting(A, 7, 7),)), 0)
    assert list(members.members) == [C]


def test_lies_about_a_member_do_not_silence_it() -> None:
    members = view(B)
    members.heard(C, make_heartbeat(1, sightings=(Sighting(B, 2**62, 2**62),)), 1)
    assert members.heard(B, make_heartbeat(2), 20)
    assert members.is_alive(B, 20)


def test_a_heartbeat_names_those_alive_freshest_first() -> None:
    members = view(B)
    members.heard(C, make_heartbeat(7), 2)
    assert members.sightings(2, random.Random(0)) == (
        Sighting(C, 1, 7, ready=True, uplink_mb_s=1.0),
        Sighting(B, 1, 1, ready=True, uplink_mb_s=1.0),
    )


def test_sightings_of_a_large_swarm_are_bounded_and_vary() -> None:
    members, rng = view(*crowd(1000)), random.Random(0)
    first, second = members.sightings(0, rng), members.sightings(0, rng)
    assert SIGHTINGS_MAX // 2 < len(first) == len(set(first)) <= SIGHTINGS_MAX
    assert first != second


def test_few_members_are_all_named_and_of_more_about_a_quarter() -> None:
    few, more = view(*crowd(SIGHTINGS_MIN)), view(*crowd(SIGHTINGS_MIN * FANOUT * 2))
    assert len(few.sightings(0, random.Random(0))) == SIGHTINGS_MIN
    named = len(more.sightings(0, random.Random(0)))
    assert SIGHTINGS_MIN < named <= 2 * SIGHTINGS_MIN


# -------------------------------------------------------------------- leaving and coming back


def test_who_left_is_not_alive_whatever_is_still_on_its_way() -> None:
    members = view(B)
    members.left(B)
    members.heard(B, make_heartbeat(2), 0.1)
    members.heard(C, make_heartbeat(1, sightings=(Sighting(B, 1, 3),)), 0.2)
    assert living(members, 0.2) == [C]


def test_who_left_comes_back_with_a_higher_incarnation() -> None:
    members = view(B)
    members.left(B)
    members.heard(B, make_heartbeat(1, incarnation=2), 5)
    assert members.is_alive(B, 5)


def test_its_return_is_also_believed_of_others() -> None:
    members = view(B)
    members.left(B)
    members.heard(C, make_heartbeat(1, sightings=(Sighting(B, 2, 1),)), 5)
    assert members.is_alive(B, 5)


def test_a_stranger_that_leaves_changes_nothing() -> None:
    members = view()
    members.left(D)
    assert members.members == {}


# -------------------------------------------------------------------- whom to tell


def test_in_a_small_swarm_everybody_tells_everybody() -> None:
    peers = crowd(ALL_TO_ALL_MAX)
    assert view(*peers).audience(0, random.Random(0)) == peers


def test_in_a_large_swarm_a_few_are_told() -> None:
    told = view(*crowd(100)).audience(0, random.Random(0))
    assert len(set(told)) == FANOUT


def test_the_silent_are_probed_and_those_that_left_are_not() -> None:
    members = view(B, C)
    members.left(C)
    assert members.audience(100, random.Random(0)) == [B]


def test_candidates_stay_in_the_order_when_they_fall_silent() -> None:
    members = view(B)
    members.heard(C, make_heartbeat(1, ready=False), 0)
    members.meet(D, 0)
    assert [members.candidate(peer) for peer in (B, C, D)] == [1.0, None, None]
    assert (members.alive(100), members.candidate(B)) == ([], 1.0)


# -------------------------------------------------------------------- large swarms


def test_what_others_say_of_a_member_makes_it_a_candidate() -> None:
    members = view()
    members.heard(B, make_heartbeat(1, sightings=(Sighting(C, 1, 1, ready=True),)), 0)
    assert (members.candidate(B), members.candidate(C)) == (1.0, 0.0)
    members.heard(C, make_heartbeat(2, ready=False), 1)
    assert (members.candidate(B), members.candidate(C)) == (1.0, None)


def test_the_revision_grows_only_when_other_candidates_may_follow() -> None:
    members = view(B)
    revisions = [members.revision]
    members.heard(B, make_heartbeat(2), 1)
    revisions.append(members.revision)
    members.heard(B, make_heartbeat(3, ready=False), 2)
    revisions.append(members.revision)
    members.left(B)
    members.left(B)
    revisions.append(members.revision)
    members.heard(B, make_heartbeat(1, incarnation=2), 3)
    revisions.append(members.revision)
    assert [b - a for a, b in itertools.pairwise(revisions)] == [0, 1, 1, 1]


def test_in_a_large_swarm_heartbeats_and_suspicion_take_their_time() -> None:
    small, large = view(*crowd(UNHURRIED_MEMBERS)), view(*crowd(16 * UNHURRIED_MEMBERS))
    assert (small.heartbeat_s, large.heartbeat_s) == (HEARTBEAT_S, 4 * HEARTBEAT_S)
    newest = crowd(16 * UNHURRIED_MEMBERS)[-1]
    assert large.is_alive(newest, 3.9 * SUSPECT_MIN_S)


def test_of_many_those_are_asked_who_spoke_last() -> None:
    members = view(*crowd(VOICES_MAX + 10))
    members.heard(crowd(1)[0], make_heartbeat(2), 1)
    voices = [m.peer for m, _ in members.voices(1)]
    assert voices == [crowd(1)[0], *reversed(crowd(VOICES_MAX + 10)[11:])]


def test_everybody_tells_everybody_up_to_a_bound() -> None:
    assert view(*crowd(ALL_TO_ALL_MAX)).tells_all(0)
    assert not view(*crowd(ALL_TO_ALL_MAX + 1)).tells_all(0)
    assert view(*crowd(ALL_TO_ALL_MAX + 1)).tells_all(100)


def test_what_a_member_overheard_is_not_kept() -> None:
    members = view()
    members.heard(B, make_heartbeat(1, sightings=(Sighting(C, 1, 1),)), 0)
    assert members.members[B].heartbeat == make_heartbeat(1)


# -------------------------------------------------------------------- bounds


def test_the_long_silent_are_forgotten() -> None:
    members = view(B)
    members.heard(C, make_heartbeat(1), FORGET_S)
    members.forget(FORGET_S + 1)
    assert list(members.members) == [C]


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 8)
    monkeypatch.setattr(membership, "HEARSAY_MAX", 4)


@pytest.mark.usefixtures("small_bounds")
def test_a_full_view_forgets_the_longest_dead_first() -> None:
    members = view(*crowd(7))
    members.heard(B, make_heartbeat(1), 20)
    assert members.meet(C, 20)
    assert crowd(1)[0] not in members.members
    assert len(members.members) == 8


@pytest.mark.usefixtures("small_bounds")
def test_a_full_view_of_living_members_takes_nobody_in() -> None:
    members = view(*crowd(8))
    assert members.meet(B, 0) is None
    assert not members.heard(B, make_heartbeat(1), 0)


@pytest.mark.usefixtures("small_bounds")
def test_made_up_members_do_not_keep_real_ones_out() -> None:
    members = Membership(A)
    names = tuple(Sighting(peer, 1, 1) for peer in crowd(20))
    members.heard(B, make_heartbeat(1, sightings=names), 0)
    assert len(members.members) == 4
    assert all(members.heard(peer, make_heartbeat(1), 0) for peer in (C, D, *crowd(4)))


def test_hearsay_fills_half_a_view() -> None:
    assert HEARSAY_MAX == MEMBERS_MAX // 2


def test_members_are_listed_in_the_order_of_their_names() -> None:
    assert living(view(D, B, C), 0) == [B, C, D]
