"""The promises, as pure functions over what can be seen of nodes from outside.

Whoever watches nodes states the same promises: the simulator after its events, the chaos test of
real processes from their status pages. Each function returns the sentence that says what is broken,
or None. A digest may be shortened, if the same watcher always shortens it alike.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from p2pdiloco.protocol.ledger import Totals


@dataclass(frozen=True, slots=True)
class FragmentSight:
    """What a node holds of a fragment.

    `head` is the digest of the newest merge record, at version 0 that of the genesis state; `state`
    that of anchor and momentum, None if it could not be read at the same moment as `head`.
    `tokens_total` are the tokens of all merges in the lineage.
    """

    version: int
    head: str
    state: str | None
    tokens_total: int


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a node.

    `at` is in seconds of the watcher's clock, `life` counts the node's starts. A fragment is None
    while the node holds none. `steps` are inner steps of its learner; they may begin anew with
    each `life`.
    """

    name: str
    at: float
    life: int
    fragments: tuple[FragmentSight | None, ...]
    tokens: Totals
    settled: bool
    steps: int


# -------------------------------------------------------------------- replicas


def identical_states(known: MutableMapping[tuple[int, str], str], sight: Sight) -> str | None:
    """At the same record of the same fragment every replica holds the same state, at any time.
    `known` remembers what was seen, by fragment and head.
    """
    for p, held in enumerate(sight.fragments):
        if held and held.state and known.setdefault((p, held.head), held.state) != held.state:
            return f"fragment {p} v{held.version}: the same record, another state"
    return None


def one_lineage(sights: Sequence[Sight]) -> str | None:
    """At an equal version all nodes stand on the same record."""
    heads: dict[tuple[int, int], FragmentSight] = {}
    for p, sight, held in _all_held(sights):
        other = heads.setdefault((p, held.version), held)
        if other.head != held.head:
            return f"fragment {p} v{held.version}: {sight.name} stands on another lineage"
    return None


def on_one_chain(sights: Sequence[Sight], parents: Mapping[str, str]) -> str | None:
    """All heads of a fragment lie on the chain of the heaviest. `parents` leads from the digest of
    a record to that of the one before it.
    """
    for p, column in enumerate(_columns(sights)):
        missing = [name for name, held in column if held is None]
        if missing:
            return f"fragment {p} is still missing at {missing}"
        heads = {name: held for name, held in column if held}
        newest = max(heads.values(), key=lambda h: (h.tokens_total, h.version, h.head))
        chain = {newest.head}
        step = newest.head
        while step in parents:
            step = parents[step]
            chain.add(step)
        off = [name for name, held in heads.items() if held.head not in chain]
        if off:
            return f"fragment {p}: {off} stand on another lineage"
    return None


def one_head(sights: Sequence[Sight]) -> str | None:
    """Everybody has settled, all on the same records."""
    for p, column in enumerate(_columns(sights)):
        if len({held.head if held else None for _, held in column}) > 1:
            versions = {name: held.version if held else None for name, held in column}
            return f"fragment {p}: different heads, at versions {versions}"
    restless = [sight.name for sight in sights if not sight.settled]
    return f"{restless} do not settle" if restless else None


# -------------------------------------------------------------------- tokens


def ledger_adds_up(sight: Sight) -> str | None:
    """Every token that was processed has one fate per fragment."""
    tokens = sight.tokens
    fates = (*tokens.rejected.values(), *tokens.lost.values(), tokens.merged, tokens.pending)
    if not tokens.adds_up or min(fates) < 0:
        return f"the ledger does not add up: {tokens}"
    return None


def no_token_vanishes(before: Sight, after: Sight) -> str | None:
    """In one life, what was processed stays processed."""
    earlier, later = before.tokens.processed, after.tokens.processed
    if before.life == after.life and later < earlier:
        return f"{earlier} tokens had been processed, now {later}"
    return None


def ledger_meets_records(sight: Sight, merged: int) -> str | None:
    """What a node calls merged is what the records of the lineage say of it."""
    if sight.tokens.merged != merged:
        return (
            f"the records say that {merged} of its tokens are merged, its ledger says "
            f"{sight.tokens}"
        )
    return None


def ledgers_meet_lineage(sights: Sequence[Sight]) -> str | None:
    """What all nodes together call merged is what their lineage has merged; `sights` are of all
    that ever took part, on one head.
    """
    merged = sum(sight.tokens.merged for sight in sights)
    total = sum(
        max((held.tokens_total for _, held in column if held), default=0)
        for column in _columns(sights)
    )
    if merged != total:
        return f"the lineage has {total} merged tokens, the ledgers together {merged}"
    return None


# -------------------------------------------------------------------- progress


def moved_on(before: Sequence[Sight], after: Sequence[Sight]) -> str | None:
    """Of each fragment there is a newer version than the newest before."""
    for p, (old, new) in enumerate(zip(_newest(before), _newest(after), strict=True)):
        if new <= old:
            return f"fragment {p} was not merged: it is still at v{new}"
    return None


def kept_training(before: Sight, after: Sight, steps_min: float) -> str | None:
    """The learner waited for nothing between two looks in one life."""
    steps = after.steps - before.steps
    if before.life == after.life and steps < steps_min:
        passed_s = after.at - before.at
        return (
            f"the learner took {steps} steps in {passed_s:.1f} s, at least {steps_min:.0f} are due"
        )
    return None


def at_most(what: str, count: float, most: float) -> str | None:
    """A bound holds."""
    return f"{count:g} {what}, at most {most:g} were promised" if count > most else None


def taken_in_turns(merges: Mapping[str, int], names: Iterable[str], tolerance: float) -> str | None:
    """Equal members synchronize about equally often: each merge count lies within `tolerance` of
    the mean, as a share of it.
    """
    counts = {name: merges.get(name, 0) for name in names}
    mean = sum(counts.values()) / len(counts)
    for name, count in counts.items():
        if abs(count - mean) > tolerance * mean:
            return f"{name} made {count} merges where {mean:.1f} are its share"
    return None


# -------------------------------------------------------------------- looking


def _columns(
    sights: Sequence[Sight],
) -> list[list[tuple[str, FragmentSight | None]]]:
    """By fragment, what each node holds of it."""
    num = len(sights[0].fragments) if sights else 0
    return [[(sight.name, sight.fragments[p]) for sight in sights] for p in range(num)]


def _all_held(sights: Sequence[Sight]) -> Iterable[tuple[int, Sight, FragmentSight]]:
    for sight in sights:
        for p, held in enumerate(sight.fragments):
            if held:
                yield p, sight, held


def _newest(sights: Sequence[Sight]) -> list[int]:
    return [
        max((held.version for _, held in column if held), default=-1) for column in _columns(sights)
    ]
