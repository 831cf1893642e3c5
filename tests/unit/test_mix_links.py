import random

from hypothesis import given
from hypothesis import strategies as st
from protocol_builders import A, B, C

from p2pdiloco.protocol.links import Links
from p2pdiloco.protocol.naming import MixId, PeerId
from p2pdiloco.protocol.topology import Row
from p2pdiloco.protocol.wire import Link, LinkStage

MIX = MixId(0, 3, "start")


def links_with(peer: PeerId, weight: float = 0.5) -> Links:
    return Links(MIX, Row(1 - weight, {peer: weight}), 10.0)


def said(stage: LinkStage, weight: float = 0.5) -> Link:
    return Link(0, 3, "start", stage, weight)


def test_a_partner_is_asked_once_it_has_something() -> None:
    links = links_with(B)
    assert not links.wants(B)
    links.heard(B, said("open"))
    assert links.wants(B)
    links.ask(B)
    assert not links.wants(B) and links.is_arriving(B)


def test_an_exchange_counts_when_both_ends_have_the_others_vector() -> None:
    links = links_with(B)
    links.heard(B, said("open"))
    links.fetched(B, 11.0)
    assert links.link(B).stage == "half" and links.whole() == Row(1.0, {})
    links.heard(B, said("half"))
    assert links.link(B).stage == "whole" and links.whole() == Row(0.5, {B: 0.5})
    assert not links.waiting_for()


def test_the_smaller_weight_of_both_ends_counts() -> None:
    links = links_with(B, 0.5)
    links.heard(B, said("half", 0.25))
    links.fetched(B, 11.0)
    assert links.whole() == Row(0.75, {B: 0.25})


def test_a_failed_fetch_is_tried_again_when_the_partner_speaks_again() -> None:
    links = links_with(B)
    links.heard(B, said("open"))
    links.ask(B)
    links.failed(B, "it broke", for_good=False)
    assert links.wants(B) and list(links.waiting_for()) == [B]
    links.failed(B, "not numbers", for_good=True)
    assert not links.wants(B) and links.failures() == {B: "not numbers"}
    assert links.link(B).stage == "void"


def test_what_the_partner_does_not_count_does_not_count_here() -> None:
    links = links_with(B)
    links.fetched(B, 11.0)
    links.heard(B, said("half"))
    links.heard(B, said("void"))
    assert links.whole() == Row(1.0, {})


def test_who_asks_although_all_is_settled_is_answered() -> None:
    links = links_with(B)
    assert links.heard(B, said("open"))  # it may have missed what we said first
    assert not links.heard(B, said("open"))
    links.fetched(B, 11.0)
    assert links.heard(B, said("half"))  # it does not know yet that ours is whole
    assert not links.heard(B, said("whole"))


@given(st.integers(0, 2**32), st.floats(0, 0.7))
def test_both_ends_agree_however_many_words_are_lost(seed: int, loss: float) -> None:
    rng = random.Random(seed)
    ends = {A: links_with(C), C: links_with(A)}
    for me, peer in ((A, C), (C, A)):
        ends[me].heard(peer, said("open"))
    for _ in range(400):
        me, peer = rng.choice([(A, C), (C, A)])
        if rng.random() < 0.3:
            ends[me].fetched(peer, 11.0)
        spoken = ends[me].link(peer)
        while spoken and rng.random() >= loss:
            answers = ends[peer].heard(me, spoken)
            me, peer = peer, me
            spoken = ends[me].link(peer) if answers else None  # type: ignore[assignment]
    assert ends[A].whole().partners and ends[C].whole().partners
