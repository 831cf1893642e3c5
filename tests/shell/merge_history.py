"""Merges of one fragment as a synchronizer makes them: records, payloads, states."""

from dataclasses import dataclass, field

import numpy as np
from memory_swarm import FRAGMENTS, GENESIS, RUN, A, B, new_replica

from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.simulation.machine import KeyedSigner
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage
from p2pdiloco_daemon.storage.replica import FragmentState, pack_state, payload_digest

P = 1
"""The fragment that these tests are about."""


@dataclass(frozen=True)
class History:
    """`states[v]` is version v; `records[v - 1]` and `payloads[v - 1]` made it."""

    records: tuple[Record, ...]
    payloads: tuple[bytes, ...]
    states: tuple[FragmentState, ...]


def make_history(num_merges: int) -> History:
    replica, rng = new_replica(), np.random.default_rng(7)
    records: list[Record] = []
    payloads, states = [], [GENESIS[P]]
    for version in range(1, num_merges + 1):
        replica.put(states[-1])
        delta = rng.normal(0, 0.1, FRAGMENTS[P].size).astype(np.float32)
        payloads.append(replica.merge(P, [(delta, 1.0)]))
        states.append(replica.apply(P, version, payloads[-1]))
        records.append(_record(states[-1], payloads[-1], records))
    return History(tuple(records), tuple(payloads), tuple(states))


def _record(state: FragmentState, payload: bytes, before: list[Record]) -> Record:
    return Record(
        run_id=RUN,
        fragment=P,
        version=state.version,
        parent=before[-1].digest if before else GENESIS[P].digest,
        payload_digest=payload_digest(payload),
        payload_bytes=len(payload),
        state_digest=state.digest,
        contributors=(Contributor(A, 100, 10),),
        refused=(),
        term=(state.version - 1) // 2,
        attempt=0,
        tokens_total=100 * state.version,
        reason="all 1 of 1 invited have answered",
        synchronizer=B,
    ).signed(KeyedSigner(B))


@dataclass
class Donor:
    """Serves what the test puts there, of fragment `P`."""

    page: RecordsPage | None = None
    merges: dict[int, bytes] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    offered: Contribution | None = None

    @classmethod
    def of(cls, history: History) -> "Donor":
        return cls(
            merges={r.version: p for r, p in zip(history.records, history.payloads, strict=True)},
            states={state.version: pack_state(state) for state in history.states},
        )

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        return self.page

    async def merge(self, fragment: int, version: int, digest: str) -> bytes | None:
        return self.merges.get(version)

    async def state(self, fragment: int, version: int, digest: str) -> bytes | None:
        return self.states.get(version)

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        return self.offered
