"""Which workers are asked, after what."""

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.standing import FAILED_S, LIED_S, WORKERS_MAX, Standing

ANNA, BERT = PeerId("anna"), PeerId("bert")


def test_a_worker_that_fails_is_left_alone_longer_each_time_in_a_row() -> None:
    standing = Standing()
    assert standing.failed(ANNA, "silent", 0.0) == FAILED_S
    assert not standing.may_ask(ANNA, FAILED_S / 2)
    assert standing.may_ask(ANNA, FAILED_S)
    assert standing.failed(ANNA, "silent", 5.0) == 2 * FAILED_S
    standing.gave(ANNA, 5, 10, 0)
    assert standing.failed(ANNA, "silent", 60.0) == FAILED_S


def test_a_burst_of_failures_counts_once() -> None:
    standing = Standing()
    for _ in range(64):
        standing.failed(ANNA, "it broke off", 0.0)
    assert standing.may_ask(ANNA, FAILED_S)


def test_a_liar_is_left_alone_for_long_and_named() -> None:
    standing = Standing()
    standing.lied(ANNA, "its reward is another", 0.0)
    assert not standing.may_ask(ANNA, LIED_S - 1)
    assert standing.may_ask(ANNA, LIED_S)
    assert standing.may_ask(BERT, 0.0)
    assert standing.records[ANNA].last_problem == "its reward is another"
    assert standing.records[ANNA].lies == 1


def test_a_worker_cannot_claim_more_reuse_than_there_was_to_reuse() -> None:
    standing = Standing()
    standing.gave(ANNA, 5, 10, 1 << 40)
    assert standing.records[ANNA].reused == 10


def test_no_more_workers_are_remembered_than_that() -> None:
    standing = Standing()
    standing.gave(ANNA, 5, 10, 0)
    for number in range(WORKERS_MAX + 5):
        standing.failed(PeerId(f"w{number}"), "silent", 0.0)
    assert len(standing.records) == WORKERS_MAX
    assert ANNA in standing.records


def test_a_worker_that_holds_turns_back_is_left_alone_for_long_though_it_told_no_lie() -> None:
    standing = Standing()
    assert standing.dawdled(ANNA, "generating for 120 s", 0.0) == LIED_S
    assert not standing.may_ask(ANNA, LIED_S - 1)
    assert standing.records[ANNA].lies == 0
