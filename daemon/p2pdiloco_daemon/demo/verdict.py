"""What a demo came to, as the JSON object it prints, and whether all is well.

Pure: from the nodes' last statuses and from what was read of their directories afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pdiloco_daemon.demo.evaluation import Findings
from p2pdiloco_daemon.status.view import JsonObject


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """One node at the end of a demo."""

    name: str
    status: JsonObject
    """The last one read."""
    end: str | None
    """How it ended before the demo did (a crash, a kill); None if it lived to the end."""
    settled: bool
    """Whether all living nodes came to rest before they were stopped."""


APART_MAX = 0.5
"""Nodes that gossip differ by design: by this share of the length of their parameters at most, or
they have gone different ways.
"""


def result(findings: Findings, nodes: Sequence[NodeOutcome]) -> JsonObject:
    """The demo's JSON object."""
    tokens = add_ledgers(nodes)
    first_merges = [
        float(node.status["first_merge_s"])
        for node in nodes
        if node.status["first_merge_s"] is not None
    ]
    return {
        "loss_before": findings.loss_before,
        "loss_after": findings.loss_after,
        "reward_before": findings.reward_before,
        "reward_after": findings.reward_after,
        "anchors_identical": anchors_identical(findings.state_digests),
        "gossips": any(node.status["disagreement"] is not None for node in nodes),
        "disagreement": findings.disagreement,
        "merges": max(_lineage_length(node.status) for node in nodes),
        "first_merge_s": min(first_merges, default=None),
        "stall_share": max(float(node.status["learner"]["stall_share"]) for node in nodes),
        "tokens": tokens,
        "ledger_adds_up": ledger_adds_up(nodes),
        "tokens_in_records": findings.tokens_in_records,
        "checkpoint": findings.checkpoint,
        "sample": findings.sample,
        "nodes": [
            _node_summary(node) | {"state_digests": findings.state_digests.get(node.name)}
            for node in nodes
        ],
    }


def all_is_well(outcome: JsonObject) -> bool:
    """What exit code 0 promises."""
    return bool(
        outcome["merges"] > 0
        and (outcome["gossips"] or outcome["anchors_identical"])
        and outcome["disagreement"] <= APART_MAX
        and outcome["ledger_adds_up"]
        and any(node["end"] is None for node in outcome["nodes"])
    )


def anchors_identical(state_digests: Mapping[str, Sequence[str]]) -> bool:
    """Whether all nodes that lived to the end hold the same anchors and momenta, by digest."""
    distinct = {tuple(digests) for digests in state_digests.values()}
    return len(distinct) == 1 and () not in distinct


def ledger_adds_up(nodes: Sequence[NodeOutcome]) -> bool:
    """processed = merged + pending + rejected + lost, for each node, exactly."""
    return all(_adds_up(_closed_ledger(node)) for node in nodes)


def add_ledgers(nodes: Sequence[NodeOutcome]) -> JsonObject:
    """The nodes' ledgers in one; rejected and lost are totals."""
    ledgers = [_closed_ledger(node) for node in nodes]
    return {name: sum(ledger[name] for ledger in ledgers) for name in ledgers[0]}


def _closed_ledger(node: NodeOutcome) -> dict[str, int]:
    """The node's ledger in totals; what a dead node had pending is lost."""
    tokens = node.status["tokens"]
    ledger = {
        "processed": int(tokens["processed"]),
        "merged": int(tokens["merged"]),
        "pending": int(tokens["pending"]),
        "rejected": sum(tokens["rejected"].values()),
        "lost": sum(tokens["lost"].values()),
    }
    if node.end is not None:
        ledger["lost"] += ledger["pending"]
        ledger["pending"] = 0
    return ledger


def _adds_up(ledger: Mapping[str, int]) -> bool:
    return ledger["processed"] == sum(ledger.values()) - ledger["processed"]


def _lineage_length(status: JsonObject) -> int:
    return sum(int(fragment["version"]) for fragment in status["fragments"])


def _node_summary(node: NodeOutcome) -> JsonObject:
    learner, status = node.status["learner"], node.status
    return {
        "name": node.name,
        "peer_id": status["peer_id"],
        "end": node.end,
        "settled": node.settled,
        "step": learner["step"],
        "tokens_per_s": learner["tokens_per_s"],
        "stall_share": learner["stall_share"],
        "restarts": learner["restarts"],
        "merges": status["merges_total"],
        "first_merge_s": status["first_merge_s"],
        "sent_bytes": status["traffic"]["sent_bytes"],
        "received_bytes": status["traffic"]["received_bytes"],
        "loop_lag_p99_ms": status["loop_lag"]["p99_ms"],
        "tokens": _closed_ledger(node),
        "rejected": status["tokens"]["rejected"],
        "lost": status["tokens"]["lost"],
    }
