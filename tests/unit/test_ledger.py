import json
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.protocol import ledger as ledgers
from p2pdiloco.protocol.ledger import BRANCH, NOT_ASKED, OVERLAP, Ledger, Totals


def worked(tokens: int = 100) -> Ledger:
    ledger = Ledger(1)
    ledger.step(0, tokens)
    return ledger


def settle(
    ledger: Ledger,
    version: int = 1,
    merged: int = 0,
    offered: int = 0,
    kind: str = "lost",
    reason: str = NOT_ASKED,
) -> Totals:
    ledger.settle(0, version, merged=merged, offered=offered, kind=kind, reason=reason)
    return ledger.totals()


def test_tokens_are_pending_until_the_fragment_is_received() -> None:
    assert worked(100).totals() == Totals(100, 0, 100, {}, {})


def test_a_token_counts_once_for_each_fragment() -> None:
    ledger = Ledger(2)
    ledger.step(0, 100)
    ledger.step(1, 100)
    assert (ledger.totals().processed, ledger.totals().pending) == (200, 200)


def test_merged_tokens_and_those_of_the_overlap_are_told_apart() -> None:
    totals = settle(worked(100), merged=80, offered=80)
    assert totals == Totals(100, 80, 0, {}, {OVERLAP: 20})


def test_what_was_offered_and_refused_is_rejected_with_the_reason() -> None:
    totals = settle(worked(100), offered=80, kind="rejected", reason="a NaN")
    assert totals == Totals(100, 0, 0, {"a NaN": 80}, {OVERLAP: 20})


def test_what_was_never_offered_is_lost_with_the_reason() -> None:
    assert settle(worked(100)) == Totals(100, 0, 0, {}, {NOT_ASKED: 100})


def test_carried_tokens_are_merged_when_another_node_has_them() -> None:
    ledger = worked(100)
    ledger.carry(0, 1)
    ledger.step(0, 20)
    ledger.carry(0, 2)
    assert ledger.totals() == Totals(120, 0, 120, {}, {})
    ledger.share(0, 1)
    assert ledger.totals() == Totals(120, 100, 20, {}, {})


def test_carried_tokens_of_a_state_that_is_gone_are_lost_with_the_reason() -> None:
    ledger = worked(100)
    ledger.carry(0, 1)
    ledger.step(0, 20)
    ledger.carry(0, 2)
    again = Ledger.load(json.loads(json.dumps(ledger.save())))
    again.lose_after(0, 1, "not on disk")
    assert again.totals() == Totals(120, 0, 100, {}, {"not on disk": 20})


def test_a_node_that_is_alone_for_long_carries_a_bounded_number_of_versions() -> None:
    ledger = Ledger(1)
    for version in range(1, ledgers.CARRIED_MAX + 10):
        ledger.step(0, 1)
        ledger.carry(0, version)
    assert len(ledger.carried[0]) == ledgers.CARRIED_MAX
    ledger.share(0, 10)
    assert ledger.totals().merged == 10


def test_the_losing_branch_takes_its_tokens_along() -> None:
    ledger = worked(100)
    settle(ledger, merged=80, offered=80)
    ledger.revise(0, 1, 0)
    assert ledger.totals() == Totals(100, 0, 0, {}, {BRANCH: 80, OVERLAP: 20})
    ledger.revise(0, 1, 80)
    assert ledger.totals() == Totals(100, 80, 0, {}, {OVERLAP: 20})


def test_a_record_that_names_us_after_the_learner_died_counts() -> None:
    ledger = worked(100)
    settle(ledger, reason="the learner died")
    ledger.revise(0, 1, 60)
    assert ledger.totals() == Totals(100, 60, 0, {}, {"the learner died": 40})


def test_a_record_that_does_not_name_us_changes_nothing() -> None:
    ledger = worked(100)
    ledger.revise(0, 7, 0)
    assert ledger.totals() == Totals(100, 0, 100, {}, {})


def test_tokens_that_a_crash_forgot_are_counted_when_a_record_names_them() -> None:
    ledger = worked(100)
    ledger.revise(0, 7, 60)
    assert ledger.totals() == Totals(160, 60, 100, {}, {})
    ledger.revise(0, 7, 60)
    assert ledger.totals() == Totals(160, 60, 100, {}, {})


def test_a_second_life_on_the_same_version_is_settled_beside_the_first() -> None:
    ledger = worked(100)
    settle(ledger, reason="the learner died")
    ledger.step(0, 50)
    totals = settle(ledger, merged=50, offered=50)
    assert totals == Totals(150, 50, 0, {}, {"the learner died": 100})


def test_old_settlements_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "RECORDS_KEPT", 3)
    ledger = Ledger(1)
    for version in range(1, 11):
        ledger.step(0, 10)
        settle(ledger, version, merged=8, offered=8)
    ledger.revise(0, 1, 0)
    assert ledger.totals() == Totals(100, 80, 0, {}, {OVERLAP: 20})
    assert len(ledger.save()["recent"][0]) == 3


def test_the_rarest_of_many_reasons_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are those of records: whoever synchronizes may find a new one for each merge."""
    monkeypatch.setattr(ledgers, "RECORDS_KEPT", 3)
    ledger = Ledger(1)
    for version in range(1, 1001):
        ledger.step(0, 30)
        reason = "late" if version % 2 else f"number {version}"
        settle(ledger, version, merged=8, offered=20, kind="rejected", reason=reason)
    totals = ledger.totals()
    assert len(totals.rejected) <= ledgers.REASONS_KEPT + 3
    assert totals.adds_up and sum(totals.rejected.values()) == 12 * 1000
    assert (totals.rejected["late"], totals.lost) == (12 * 500, {OVERLAP: 10_000})
    assert totals.rejected[ledgers.OTHER_REASONS] > 12 * 400
    assert len(ledger.save()["old"]["fates"]) <= ledgers.REASONS_KEPT + 1
    assert Ledger.load(json.loads(json.dumps(ledger.save()))).totals() == totals


def test_what_is_saved_is_json_and_comes_back() -> None:
    ledger = worked(100)
    settle(ledger, merged=80, offered=80)
    ledger.step(0, 5)
    again = Ledger.load(json.loads(json.dumps(ledger.save())))
    assert again.totals() == ledger.totals()
    assert again.save() == ledger.save()


def test_what_was_saved_does_not_change_afterwards() -> None:
    ledger = worked(100)
    settle(ledger, merged=80, offered=80)
    saved = ledger.save()
    before = json.dumps(saved)
    ledger.revise(0, 1, 0)
    ledger.step(0, 7)
    assert json.dumps(saved) == before


@pytest.mark.parametrize("number", [-5, 7, float("inf"), float("nan"), "x", None])
@pytest.mark.parametrize("key", ["processed", "pending", "old"])
def test_a_ledger_that_does_not_add_up_is_refused(key: str, number: object) -> None:
    ledger = worked(100)
    settle(ledger, merged=80, offered=80)
    saved = ledger.save()
    saved[key] = [number] if key == "pending" else number
    with pytest.raises((KeyError, TypeError, ValueError, OverflowError)):
        Ledger.load(saved)


@pytest.mark.parametrize("saved", [{}, {"pending": None}, {"pending": ["x"]}], ids=str)
def test_what_was_not_saved_by_a_ledger_is_refused(saved: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Ledger.load(saved)


# -------------------------------------------------------------------- any history


@dataclass
class History:
    """A ledger of one fragment, and what its lineage says."""

    ledger: Ledger = field(default_factory=lambda: Ledger(1))
    version: int = 0
    lineage: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def step(self, tokens: int) -> None:
        self.ledger.step(0, tokens)

    def receive(self, offered: int, merged: int) -> None:
        """The next version is received; we may be in it."""
        self.version += 1
        merged = min(merged, offered, self.ledger.pending[0])
        self.lineage[self.version] = merged
        self.ledger.settle(
            0, self.version, merged=merged, offered=offered, kind="rejected", reason="too late"
        )

    def die(self) -> None:
        """The learner dies on this version, and trains on it again."""
        self.ledger.settle(
            0, self.version + 1, merged=0, offered=0, kind="lost", reason="the learner died"
        )

    def die_and_be_named(self, merged: int) -> None:
        """The record of what it had offered comes while it is dead."""
        self.die()
        self.version += 1
        self.lineage[self.version] = merged
        self.ledger.revise(0, self.version, merged)

    def fork(self, back: int, merged: int) -> None:
        """Another lineage says something else of an older version."""
        version = self.version - back
        if version >= 1:
            self.lineage[version] = merged
            self.ledger.revise(0, version, merged)

    def restart(self) -> None:
        self.ledger = Ledger.load(json.loads(json.dumps(self.ledger.save())))


small = st.integers(0, 50)
deeds = st.one_of(
    st.tuples(st.just("step"), st.tuples(st.integers(1, 50))),
    st.tuples(st.just("receive"), st.tuples(small, small)),
    st.tuples(st.just("fork"), st.tuples(st.integers(0, 5), small)),
    st.tuples(st.just("die_and_be_named"), st.tuples(small)),
    st.tuples(st.sampled_from(["restart", "die"]), st.just(())),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(deeds, max_size=30))
def test_every_token_has_one_fate_and_merged_is_what_the_lineage_says(
    happened: list[tuple[str, tuple[int, ...]]],
) -> None:
    history = History()
    for name, arguments in happened:
        getattr(history, name)(*arguments)
        totals = history.ledger.totals()
        assert totals.adds_up
        assert min([0, *totals.lost.values(), *totals.rejected.values()]) >= 0
        assert totals.merged == sum(history.lineage.values())
