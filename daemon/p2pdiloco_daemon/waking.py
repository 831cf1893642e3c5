"""From a verified spec and a directory to a core that stands where its last life ended."""

import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from p2pdiloco.errors import UserError
from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.optim.mixing import Part, end_tensors, part_of
from p2pdiloco.protocol.lineage import Chain, Signer
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.pacing import SyncTimes
from p2pdiloco.protocol.state import NodeConfig
from p2pdiloco.protocol.topology import (
    PAIRS,
    GossipPlan,
    Groups,
    Topology,
    exponential,
    hypercube,
    ring,
)
from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco.spec import RunSpec
from p2pdiloco_bootstrap import identity as identities
from p2pdiloco_bootstrap.addresses import split_peer
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_daemon.mixing import RETURNING_MAX, Mixing, MixSettings
from p2pdiloco_daemon.node import SAVED_NODE, saved
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.place import Place
from p2pdiloco_daemon.storage.replica import Replica

REPLICA_BYTES_PER_PARAMETER = 8
"""Anchor and momentum in float32, in the daemon."""
LEARNER_BYTES_PER_PARAMETER = 24
"""Weights, gradients, Adam's moments in float32, and both areas of the shared memory."""
ROLLOUTS_BYTES_PER_PARAMETER = 12
"""Of an rl run, in which every node generates: weights and both areas of the shared memory."""
REFERENCE_BYTES_PER_PARAMETER = 4
"""Where a KL term holds the policy to an older one: its weights, in the learner."""
RL_GRACE_S = 2.0
"""What a round of an rl run waits for learners that are on their way: they all wait for its merge,
and the next step's rollouts take longer than this."""

INCARNATION_MAX = 1 << 53
"""No clock and no number of lives comes near; what a file says beyond it is damage."""
SWAP_BYTES_PER_PARAMETER = 8
"""Of a run that gossips, per partner of a round: its vector, and ours as it has it."""
COPIES_BYTES_PER_PARAMETER = 13
"""Below the quorum: our values, as the partner has them, its own, and encoded."""
REMEMBERED_BYTES_PER_PARAMETER = 12
"""Per partner that is sent differences."""
GLOBAL_MEMBERS_MAX = 16
"""With so many a node mixes at most where a run says everybody; of more, groups as large as this
mix, drawn anew in each round: what a node holds and sends stays bounded.
"""
PARTNERS = {
    "GlobalM1": GLOBAL_MEMBERS_MAX - 1,
    "GlobalM1LocalM2": GLOBAL_MEMBERS_MAX - 1,
    "pairwise": 1,
    "hypercube": 1,
    "exponential": 2,
    "ring": 2,
}
"""In a round, at most."""

logger = logging.getLogger(__name__)


def require_memory(fragments: tuple[Fragment, ...], spec: RunSpec) -> None:
    """UserError if the model does not fit beside what else runs; says what it takes."""
    num = sum(fragment.size for fragment in fragments)
    per_parameter = REPLICA_BYTES_PER_PARAMETER + LEARNER_BYTES_PER_PARAMETER
    if spec.sync.gossips:
        partners = PARTNERS[spec.sync.mix]
        remembered = RETURNING_MAX if _partners_return(spec) else 0
        swaps = partners + (GLOBAL_MEMBERS_MAX - 1 if spec.sync.strategy == "factored" else 0)
        per_parameter += swaps * SWAP_BYTES_PER_PARAMETER
        per_parameter += min(remembered, partners + 2) * REMEMBERED_BYTES_PER_PARAMETER
    elif spec.rl:
        per_parameter += ROLLOUTS_BYTES_PER_PARAMETER
        per_parameter += REFERENCE_BYTES_PER_PARAMETER if spec.rl.kl_weight else 0
    elif _mixes_below_quorum(spec):
        per_parameter += COPIES_BYTES_PER_PARAMETER
    needed = num * per_parameter
    available = psutil.virtual_memory().available
    logger.info(
        "%.2f million parameters: about %.0f MB of memory, beside activations",
        num / 1e6,
        needed / 1e6,
    )
    if needed > available:
        raise UserError(
            f"this run's model needs about {needed / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are free; close other programs or join from a larger machine"
        )


def replica_of(spec: RunSpec, fragments: tuple[Fragment, ...]) -> Replica:
    return Replica(
        fragments,
        outer_learning_rate=spec.outer.learning_rate,
        outer_momentum=spec.outer.momentum,
        wire=spec.sync.wire,
        merge_rule=spec.sync.merge,
        paced_inner_steps=spec.sync.inner_steps if spec.sync.slack_steps else None,
        may_stand_still=spec.rl is not None,
    )


def gossip_plan(spec: RunSpec, run_id: str) -> GossipPlan | None:
    """Who mixes with whom, if the run gossips: the paper's instances, and some topologies."""
    if not spec.sync.gossips:
        return None
    mix1: dict[str, Topology] = {
        "GlobalM1": Groups(GLOBAL_MEMBERS_MAX),
        "GlobalM1LocalM2": Groups(GLOBAL_MEMBERS_MAX),
        "pairwise": PAIRS,
        "hypercube": hypercube,
        "exponential": exponential,
        "ring": ring,
    }
    mixed = frozenset(p for p, part in enumerate(outer_parts(spec)) if part.spans)
    return GossipPlan(
        mix1=mix1[spec.sync.mix],
        mix2=_blocking_mix(spec),
        seed=run_id,
        by_quorum=spec.sync.strategy == "factored",
        mix2_fragments=mixed,
    )


def _blocking_mix(spec: RunSpec) -> Topology | None:
    if spec.sync.strategy == "factored":
        return Groups(GLOBAL_MEMBERS_MAX)
    return Groups(spec.sync.mix_group) if spec.sync.mix == "GlobalM1LocalM2" else None


def outer_parts(spec: RunSpec) -> tuple[Part, ...]:
    """Of each fragment, the tensors that a blocking mix is for; there may be none."""
    fragments = fragments_of(spec)
    slots = [slot for fragment in fragments for slot in fragment.slots]
    everything = frozenset(slot.name for slot in slots)
    names = everything if spec.sync.mix2_tensors == "all" else end_tensors(slots)
    return tuple(part_of(fragment, names) for fragment in fragments)


def _partners_return(spec: RunSpec) -> bool:
    """Whether the same few members are partners again and again."""
    return spec.sync.mix in ("hypercube", "exponential", "ring")


def _mixes_below_quorum(spec: RunSpec) -> bool:
    return spec.sync.strategy == "quorum" and spec.sync.gossip_below_quorum


def mixing_of(spec: RunSpec, holdings: Holdings, me: PeerId) -> Mixing | None:
    """The arithmetic of a run that gossips, always or below its quorum."""
    if not spec.sync.gossips and not _mixes_below_quorum(spec):
        return None
    settings = MixSettings(
        me=me,
        learning_rate=spec.outer.learning_rate,
        momentum=spec.outer.momentum,
        start_wire=spec.sync.mix_wire,
        outer_wire=spec.sync.wire,
        merge_rule=spec.sync.merge,
        outer_parts=outer_parts(spec),
        partners_return=_partners_return(spec),
    )
    return Mixing(holdings, settings)


class _Signer:
    """The core's view of the node's key and of the keys in peer ids."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return identities.verify(peer, data, signature)


def wake_up(
    holdings: Holdings, signed: SignedSpec, identity: Identity, place: Place, now: float
) -> Node:
    """The core with what an earlier life left on disk. Blocks."""
    spec, signer = signed.spec, _Signer(identity)
    assert spec.genesis
    plan = gossip_plan(spec, signed.run_id)
    chains = holdings.resume(
        signed.run_id, spec.genesis.state_digests, signer, unvouched=plan is not None
    )
    kept = holdings.load_json(SAVED_NODE)
    if not isinstance(kept, dict):
        if kept is not None:
            logger.warning("the kept ledger is damaged (%.80r); a new one begins", kept)
        kept = {}
    config = NodeConfig(
        run_id=signed.run_id,
        me=PeerId(identity.peer_id),
        name=identity.peer_id[-8:],
        incarnation=next_incarnation(kept.get("incarnation"), time.time()),
        genesis_digests=spec.genesis.state_digests,
        genesis_donors=tuple(
            dict.fromkeys(PeerId(split_peer(address)[1]) for address in place.bootstraps)
        ),
        times=SyncTimes(
            inner_steps=spec.sync.inner_steps,
            num_fragments=spec.sync.num_fragments,
            overlap_steps=spec.sync.overlap_steps,
            quorum=spec.sync.quorum,
            grace_factor=spec.sync.grace_factor,
            slack_steps=spec.sync.slack_steps,
            grace_least_s=RL_GRACE_S if spec.rl else 0.0,
        ),
        term_merges=spec.sync.term_merges,
        pacing=spec.sync.pacing,
        pacing_tokens=spec.sync.pacing_tokens,
        contributors_max=spec.limits.max_contributors,
        gossip=plan,
        mixes_below_quorum=_mixes_below_quorum(spec),
        blocks=spec.sync.strategy == "diloco",
        rolls_out=spec.rl is not None,
    )
    node = _revive(config, signer, now, chains, kept.get("core"))
    holdings.store.save_json(SAVED_NODE, saved(node))
    return node


def next_incarnation(before: object, now: float) -> int:
    """Above the last life's; `before` is what a file says of it, `now` is a clock's.

    The clock helps where the file was lost: peers ignore a life that seems older than the last.
    """
    match before:
        case int(last) if 0 <= last < INCARNATION_MAX:
            return max(last + 1, int(now))
        case _:
            return int(now)


def _revive(
    config: NodeConfig,
    signer: Signer,
    now: float,
    chains: Sequence[Chain | None],
    core: Mapping[str, Any] | None,
) -> Node:
    """With the ledger that was kept, or with a new one where that cannot be read."""
    try:
        return Node(config, signer, random.Random(), now, chains, core)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        logger.warning("the kept ledger is damaged (%r); a new one begins", error)
        return Node(config, signer, random.Random(), now, chains)
