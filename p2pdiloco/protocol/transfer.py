"""How to get from the state that a node holds to a donor's newest: one plan for joiners, sleepers,
forks and healing.
"""

from collections.abc import Sequence

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import Chain, Record, describe

Plan = tuple[SnapshotInfo | None, tuple[Record, ...]]
"""Load the snapshot, if any, then apply the merges of these records in order."""


def plan_catch_up(
    chain: Chain | None,
    records: Sequence[Record],
    snapshots: Sequence[SnapshotInfo],
    genesis_digest: str,
    fragment: int,
    *,
    replay: bool = True,
    distrusted: bool = False,
    begun: SnapshotInfo | None = None,
) -> Plan | None:
    """None when the donor has nothing newer. `records` are checked, contiguous and ascending.

    A node that stands on the donor's lineage replays merges, which are a tenth of a state. One that
    does not, or holds nothing, or found that the payloads are gone (`replay` is False), or that its
    own state is `distrusted`, loads the newest snapshot whose digest a record of that lineage (or
    the run spec, for version 0) vouches for; or rather the one that was `begun`, as long as it is
    on offer: over a slow link a newer one would be begun for ever. Raises PeerError if there is
    none.
    """
    weight = records[-1].weight if records else (0, 0)
    if chain and (weight < chain.weight or (weight == chain.weight and not distrusted)):
        return None
    vouched = [s for s in snapshots if _vouched(s, records, genesis_digest)]
    if chain and not distrusted and chain.common_version(records) == chain.version:
        vouched = [s for s in vouched if s.version > chain.version]
        newer = tuple(r for r in records if r.version > chain.version)
        if newer[0].tokens_total != chain.tokens_total + newer[0].tokens:
            raise PeerError(f"tokens_total of {describe(newer[0])} does not add up")
        if replay or not vouched:
            return None, newer
    if not vouched:
        raise PeerError(
            f"fragment {fragment}: the donor offers no snapshot that its {len(records)} records "
            f"or the run spec vouch for"
        )
    chosen = max(vouched, key=lambda s: (s == begun, s.version))
    return chosen, tuple(r for r in records if r.version > chosen.version)


def _vouched(snapshot: SnapshotInfo, records: Sequence[Record], genesis_digest: str) -> bool:
    if snapshot.version == 0:
        connected = not records or (records[0].version == 1 and records[0].parent == genesis_digest)
        return connected and snapshot.state_digest == genesis_digest
    return any(
        r.version == snapshot.version and r.state_digest == snapshot.state_digest for r in records
    )


def adopted_chain(
    before: Chain | None, lineage: Sequence[Record], version: int, genesis_digest: str
) -> Chain:
    """The chain after a snapshot of `version` on `lineage` was loaded, with the older records that
    still connect.
    """
    if not lineage:
        return Chain(0, genesis_digest)
    chain = Chain(lineage[0].version - 1, lineage[0].parent)
    if before and before.digest_at(chain.base) == chain.base_digest:
        older = [r for r in before.records if r.version <= chain.base]
        chain = Chain(before.base, before.base_digest, older)
    for record in lineage:
        if record.version <= version:
            chain.append(record)
    return chain
