"""The token ledger of one node: every token it ever processed has exactly one fate per fragment.

    processed = merged + pending + rejected + lost

Fragments are independent registers, so a token counts once for each fragment ("token-fragments"):
it can be merged into one and lost from another. Tokens trained on version v of a fragment are
*pending* until the fragment is overwritten or the learner dies; then they are settled under the
version v + 1 that they could have become part of. What the record of v + 1 on this node's lineage
says of this node is merged; the rest has a reason. When the lineage changes, the settlement is
revised.

Where there is no lineage, tokens are *carried* from the round that they were trained in, in this
node's own state, until another node has mixed that state into its own: pending until then, and
merged from then on.
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pdiloco.protocol.lineage import RECORDS_KEPT

OVERLAP = "trained between snapshot and receipt, then overwritten"
NOT_ASKED = "not in any round before the fragment was overwritten"
CARRIED_MAX = RECORDS_KEPT
"""Versions of a fragment in which tokens are carried; those of the oldest are counted together."""
BRANCH = "merged on a lineage that lost"
REASONS_KEPT = 64
"""Of old settlements, that are counted one by one: most come from records, so each merge may bring
a new one. The rarest are counted together.
"""
OTHER_REASONS = "other reasons"


@dataclass(slots=True)
class Settlement:
    """Fates of the tokens that this node trained on version `version - 1`."""

    tokens: int = 0
    merged: int = 0
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    """("rejected" | "lost", reason) -> tokens; with `merged` they sum to `tokens`."""

    def add(self, tokens: int, merged: int, offered: int, kind: str, reason: str) -> None:
        """`offered` tokens were ready in a round; those not merged are `kind` for `reason`, the
        rest overlapped.
        """
        offered = min(max(offered, merged), tokens)
        self.tokens += tokens
        self.merged += merged
        self._put(kind, reason, offered - merged)
        self._put("lost", OVERLAP if offered else reason, tokens - offered)

    def revise(self, merged: int, reason: str = BRANCH) -> int:
        """Sets what the lineage says was merged; returns by how many tokens `tokens` had to grow
        for that. What was merged and is not any more is lost for `reason`.

        It grows only when the node died after it contributed and before its ledger was saved.
        """
        grown = max(0, merged - self.tokens)
        self.tokens += grown
        change = merged - self.merged - grown
        self.merged = merged
        if change < 0:
            self._put("lost", reason, -change)
        for fate in sorted(self.fates, key=lambda fate: (fate != ("lost", BRANCH), fate)):
            taken = min(max(change, 0), self.fates[fate])
            self.fates[fate] -= taken
            change -= taken
        self.fates += Counter()
        return grown

    def _put(self, kind: str, reason: str, tokens: int) -> None:
        if tokens:
            self.fates[kind, reason] += tokens


@dataclass(frozen=True, slots=True)
class Totals:
    """Token-fragments; `rejected` and `lost` by reason."""

    processed: int
    merged: int
    pending: int
    rejected: Mapping[str, int]
    lost: Mapping[str, int]

    @property
    def adds_up(self) -> bool:
        fates = sum(self.rejected.values()) + sum(self.lost.values())
        return self.processed == self.merged + self.pending + fates


class Ledger:
    """Sums over all fragments, and the newest `RECORDS_KEPT` settlements of each, which can still
    be revised.

    What `totals` and `save` cost does not grow with the number of merges: both are kept up to date
    by `_withdraw` and `_deposit`, between which alone a settlement changes.
    """

    def __init__(self, num_fragments: int):
        self.pending = [0] * num_fragments
        self.carried: list[dict[int, int]] = [{} for _ in range(num_fragments)]
        """For each fragment, by the version that was made of them."""
        self._processed = 0
        self._merged = 0
        self._fates: Counter[tuple[str, str]] = Counter()
        self._recent: list[dict[int, Settlement]] = [{} for _ in range(num_fragments)]
        self._saved: list[dict[str, Any]] = [{} for _ in range(num_fragments)]
        """`_recent` as plain data."""
        self._old = Settlement()
        self._forgotten = [0] * num_fragments
        """Newest version of each fragment whose settlement is only a part of `_old` any more."""

    def step(self, fragment: int, tokens: int) -> None:
        self.pending[fragment] += tokens
        self._processed += tokens

    def settle(
        self, fragment: int, version: int, *, merged: int, offered: int, kind: str, reason: str
    ) -> None:
        """Everything pending was trained on `version - 1` and is pending no more."""
        tokens, self.pending[fragment] = self.pending[fragment], 0
        settlement = self._withdraw(fragment, version)
        already = settlement.merged
        settlement.add(tokens, min(max(merged - already, 0), tokens), offered, kind, reason)
        self._processed += settlement.revise(merged)
        self._deposit(fragment, version, settlement)

    def revise(self, fragment: int, version: int, merged: int, reason: str = BRANCH) -> None:
        """The lineage says now that `merged` of our tokens are in this version, for which nothing
        is pending.

        Those that were never settled were processed in an earlier life, after its last save.
        """
        known = self._recent[fragment].get(version)
        if known is None and (not merged or version <= self._forgotten[fragment]):
            return
        if known is None or merged != known.merged:
            settlement = self._withdraw(fragment, version)
            self._processed += settlement.revise(merged, reason)
            self._deposit(fragment, version, settlement)

    def carry(self, fragment: int, version: int) -> None:
        """Everything pending is in this node's state of `version`, and in nobody else's."""
        carried, tokens = self.carried[fragment], self.pending[fragment]
        self.pending[fragment] = 0
        if tokens:
            carried[version] = carried.get(version, 0) + tokens
        if len(carried) > CARRIED_MAX:
            oldest, next_oldest = sorted(carried)[:2]
            carried[next_oldest] += carried.pop(oldest)

    def share(self, fragment: int, version: int) -> None:
        """Another node has mixed our state of `version`: what was carried in it is merged."""
        for made in [v for v in self.carried[fragment] if v <= version]:
            tokens = self.carried[fragment].pop(made)
            settlement = self._withdraw(fragment, made)
            settlement.add(tokens, tokens, tokens, "lost", NOT_ASKED)
            self._deposit(fragment, made, settlement)

    def lose_after(self, fragment: int, version: int, reason: str) -> None:
        """What was merged into or is carried in later versions is lost: this node does not hold
        them any more.
        """
        for later in [v for v in self._recent[fragment] if v > version]:
            self.revise(fragment, later, 0, reason)
        self.lose_carried(fragment, version, reason)

    def lose_carried(self, fragment: int, version: int, reason: str) -> None:
        """The same for what is carried alone."""
        for later in [v for v in self.carried[fragment] if v > version]:
            tokens = self.carried[fragment].pop(later)
            settlement = self._withdraw(fragment, later)
            settlement.add(tokens, 0, tokens, "lost", reason)
            self._deposit(fragment, later, settlement)

    def totals(self) -> Totals:
        split: dict[str, dict[str, int]] = {"rejected": {}, "lost": {}}
        for (kind, reason), tokens in sorted(self._fates.items()):
            split[kind][reason] = tokens
        pending = sum(self.pending) + sum(sum(each.values()) for each in self.carried)
        return Totals(self._processed, self._merged, pending, split["rejected"], split["lost"])

    def _withdraw(self, fragment: int, version: int) -> Settlement:
        """Takes a settlement out of the sums, to be changed and deposited again."""
        settlement = self._recent[fragment].pop(version, None) or Settlement()
        self._merged -= settlement.merged
        self._fates -= settlement.fates
        return settlement

    def _deposit(self, fragment: int, version: int, settlement: Settlement) -> None:
        self._merged += settlement.merged
        self._fates += settlement.fates
        recent, saved = self._recent[fragment], self._saved[fragment]
        recent[version], saved[str(version)] = settlement, _saved(settlement)
        while len(recent) > RECORDS_KEPT:
            oldest = self._forgotten[fragment] = min(recent)
            old = recent.pop(oldest)
            del saved[str(oldest)]
            self._old.tokens += old.tokens
            self._old.merged += old.merged
            self._old.fates.update(old.fates)
            self._put_rare_reasons_together()

    def _put_rare_reasons_together(self) -> None:
        old = self._old.fates
        named = [fate for fate in old if fate[1] != OTHER_REASONS]
        rare = heapq.nsmallest(len(named) - REASONS_KEPT, named, key=lambda fate: (old[fate], fate))
        for kind, reason in rare:
            tokens = old.pop((kind, reason))
            old[kind, OTHER_REASONS] += tokens
            self._fates += {(kind, OTHER_REASONS): tokens}
            self._fates -= {(kind, reason): tokens}

    def save(self) -> dict[str, Any]:
        """Plain data for JSON; nothing changes it afterwards."""
        return {
            "processed": self._processed,
            "pending": list(self.pending),
            "carried": [{str(v): n for v, n in each.items()} for each in self.carried],
            "forgotten": list(self._forgotten),
            "old": _saved(self._old),
            "recent": [dict(saved) for saved in self._saved],
        }

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "Ledger":
        """What `save` returned. Raises KeyError, TypeError, ValueError or OverflowError for
        anything else.
        """
        ledger = cls(len(saved["pending"]))
        ledger._processed = int(saved["processed"])
        ledger.pending = [int(tokens) for tokens in saved["pending"]]
        ledger.carried = [
            {int(version): int(tokens) for version, tokens in each.items()}
            for each in saved["carried"]
        ]
        ledger._forgotten = [int(version) for version in saved["forgotten"]]
        ledger._old = _loaded(saved["old"])
        ledger._merged, ledger._fates = ledger._old.merged, Counter(ledger._old.fates)
        for fragment, recent in enumerate(saved["recent"]):
            for version, settlement in recent.items():
                ledger._deposit(fragment, int(version), _loaded(settlement))
        totals = ledger.totals()
        counts = [*ledger.pending, *(n for each in ledger.carried for n in each.values())]
        if not totals.adds_up or min(counts, default=0) < 0 or totals.merged < 0:
            raise ValueError(f"a ledger that does not add up: {totals}")
        return ledger


def _saved(settlement: Settlement) -> dict[str, Any]:
    fates = [[kind, reason, tokens] for (kind, reason), tokens in settlement.fates.items()]
    return {"tokens": settlement.tokens, "merged": settlement.merged, "fates": fates}


def _loaded(saved: Mapping[str, Any]) -> Settlement:
    fates = Counter({(str(kind), str(reason)): int(n) for kind, reason, n in saved["fates"]})
    return Settlement(int(saved["tokens"]), int(saved["merged"]), fates)
