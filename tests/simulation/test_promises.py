"""Each promise holds where it should, and says what is broken where it is not kept."""

from dataclasses import replace

from p2pdiloco.protocol.ledger import Totals
from p2pdiloco.simulation import promises
from p2pdiloco.simulation.promises import FragmentSight, Sight

TOKENS = Totals(processed=100, merged=60, pending=20, rejected={"late": 10}, lost={"died": 10})
V1 = FragmentSight(version=1, head="one", state="a", tokens_total=60)
V2 = FragmentSight(version=2, head="two", state="b", tokens_total=120)
FORK = FragmentSight(version=2, head="too", state="c", tokens_total=90)
PARENTS = {"two": "one", "too": "one", "one": "genesis"}


def sight(name: str, *fragments: FragmentSight | None, **changes: object) -> Sight:
    seen = Sight(name, 0.0, 1, fragments, TOKENS, settled=True, steps=10)
    return replace(seen, **changes)  # type: ignore[arg-type]


def test_one_record_means_one_state_for_everybody_at_any_time() -> None:
    known: dict[tuple[int, str], str] = {}
    assert promises.identical_states(known, sight("anna", V1, V2)) is None
    assert promises.identical_states(known, sight("bert", V2)) is None, "another fragment"
    assert promises.identical_states(known, sight("bert", replace(V1, state=None))) is None
    broken = promises.identical_states(known, sight("bert", replace(V1, state="rotten")))
    assert broken == "fragment 0 v1: the same record, another state"


def test_nodes_at_one_version_stand_on_one_record() -> None:
    assert promises.one_lineage([sight("anna", V1), sight("bert", V2)]) is None
    broken = promises.one_lineage([sight("anna", V2), sight("bert", FORK)])
    assert broken == "fragment 0 v2: bert stands on another lineage"


def test_heads_lie_on_the_chain_of_the_heaviest() -> None:
    assert promises.on_one_chain([sight("anna", V2), sight("bert", V1)], PARENTS) is None
    broken = promises.on_one_chain([sight("anna", V2), sight("bert", FORK)], PARENTS)
    assert broken == "fragment 0: ['bert'] stand on another lineage"
    broken = promises.on_one_chain([sight("anna", V2), sight("bert", None)], PARENTS)
    assert broken == "fragment 0 is still missing at ['bert']"


def test_settled_nodes_have_one_head() -> None:
    assert promises.one_head([sight("anna", V2), sight("bert", V2)]) is None
    assert "different heads" in str(promises.one_head([sight("anna", V2), sight("bert", V1)]))
    restless = sight("bert", V2, settled=False)
    assert promises.one_head([sight("anna", V2), restless]) == "['bert'] do not settle"


def test_every_token_has_a_fate() -> None:
    assert promises.ledger_adds_up(sight("anna")) is None
    missing = sight("anna", tokens=replace(TOKENS, pending=19))
    assert "does not add up" in str(promises.ledger_adds_up(missing))
    negative = sight("anna", tokens=replace(TOKENS, pending=-1, merged=81))
    assert "does not add up" in str(promises.ledger_adds_up(negative))


def test_tokens_do_not_vanish_within_a_life() -> None:
    fewer = sight("anna", tokens=replace(TOKENS, processed=90))
    assert promises.no_token_vanishes(sight("anna"), fewer) is not None
    assert promises.no_token_vanishes(sight("anna"), replace(fewer, life=2)) is None


def test_ledgers_say_what_the_records_say() -> None:
    assert promises.ledger_meets_records(sight("anna"), 60) is None
    assert promises.ledger_meets_records(sight("anna"), 61) is not None
    both = [sight("anna", V2), sight("bert", V2)]
    assert promises.ledgers_meet_lineage(both) is None
    assert promises.ledgers_meet_lineage(both[:1]) is not None


def test_progress_is_a_newer_version_of_each_fragment() -> None:
    before = [sight("anna", V1, V1), sight("bert", V2, V1)]
    assert promises.moved_on([sight("anna", V1, V1)], before) == (
        "fragment 1 was not merged: it is still at v1"
    )
    assert promises.moved_on([sight("anna", V1, None)], before) is None


def test_learners_wait_for_nothing() -> None:
    before, after = sight("anna", at=0.0, steps=10), sight("anna", at=10.0, steps=15)
    assert promises.kept_training(before, after, steps_min=5) is None
    assert promises.kept_training(before, after, steps_min=6) is not None
    assert promises.kept_training(before, replace(after, life=2, steps=0), steps_min=6) is None


def test_bounds_hold_and_turns_are_taken() -> None:
    assert promises.at_most("open rounds", 2, 2) is None
    assert promises.at_most("open rounds", 3, 2) == "3 open rounds, at most 2 were promised"
    assert promises.taken_in_turns({"anna": 9, "bert": 11}, ["anna", "bert"], 0.2) is None
    assert promises.taken_in_turns({"anna": 20}, ["anna", "bert"], 0.5) is not None
