"""The status as Prometheus text, exposition format 0.0.4: the same numbers as `/api/status`.

Seconds and bytes are base units here as Prometheus asks, so milliseconds are converted. A value
that is not known yet has no sample; a family without samples is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from p2pdiloco_daemon.status.view import FragmentSync, NodeState, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: tuple[tuple[Labels, float | None], ...]


def metrics_text(status: Status) -> str:
    """All families, each with HELP and TYPE, ending in a newline."""
    lines = [line for family in _families(status) for line in _family_lines(family)]
    return "\n".join(lines) + "\n"


def _families(status: Status) -> Iterator[_Family]:
    yield from _node(status)
    yield from _learner(status)
    yield from _tokens(status)
    yield from _learning(status)
    yield from _rollouts(status)
    yield from _dispatching(status)
    yield from _swarm(status)
    yield from _machine(status)


def _node(status: Status) -> Iterator[_Family]:
    identity = {
        "version": status.app_version,
        "protocol": str(status.protocol_version),
        "run": status.run.id,
        "run_name": status.run.name,
        "peer": status.peer_id,
        "node": status.node_name,
    }
    states = tuple(({"state": s.value}, float(s is status.state)) for s in NodeState)
    yield _Family("info", "gauge", "Who this node is; always 1.", ((identity, 1),))
    yield _Family("state", "gauge", "1 for the state the node is in, 0 for the others.", states)
    yield _gauge("uptime_seconds", "Seconds since the daemon started.", status.uptime_s)


def _learner(status: Status) -> Iterator[_Family]:
    learner = status.learner
    yield _counter("inner_steps_total", "Inner steps of the learner.", learner.step)
    yield _counter(
        "learner_evaluation_seconds_total",
        "Time spent on the held-out loss.",
        learner.evaluation_s,
    )
    yield _counter("learner_restarts_total", "Restarts of a dead learner.", learner.restarts)
    yield _gauge("tokens_per_second", "Tokens trained on per second.", learner.tokens_per_s)
    yield _gauge("step_seconds", "Recent duration of one inner step.", learner.step_s)
    yield _gauge("training_loss", "Training loss, nats per token.", learner.loss)
    yield _gauge("held_out_loss", "Held-out loss, nats per byte.", learner.held_out_loss)
    yield _gauge("stall_ratio", "Share of time the swarm costs the learner.", learner.stall_share)
    yield _counter("compute_seconds_total", "Time in inner steps.", learner.compute_s)
    yield _counter(
        "compute_queued_seconds_total",
        "Part of it in which other programs had the cores.",
        learner.compute_queued_s,
    )
    yield _counter("stall_seconds_total", "Time between inner steps.", learner.stall_s)
    yield _counter(
        "stall_queued_seconds_total",
        "Part of it in which other programs had the cores.",
        learner.stall_queued_s,
    )


def _tokens(status: Status) -> Iterator[_Family]:
    tokens = status.tokens
    yield _counter("tokens_processed_total", "Token-fragments trained on.", tokens.processed)
    yield _gauge(
        "tokens_merged",
        "Token-fragments merged; falls when a lineage loses and they become lost.",
        tokens.merged,
    )
    yield _gauge("tokens_pending", "Token-fragments not merged yet.", tokens.pending)
    yield _by_label(
        "tokens_rejected_total", "Token-fragments not taken, by reason.", "reason", tokens.rejected
    )
    yield _by_label("tokens_lost_total", "Token-fragments lost, by reason.", "reason", tokens.lost)
    yield _gauge("tokens_add_up", "1 if the ledger adds up exactly, else 0.", tokens.adds_up)


def _learning(status: Status) -> Iterator[_Family]:
    learning = status.learning
    if learning is None:
        return
    yield _gauge("reward", "Mean reward of the last share learnt from.", learning.reward)
    yield _gauge("policy_drift", "Divergence from the policy rolled out, nats.", learning.drift)
    yield _counter("episodes_total", "Episodes in all shares.", learning.episodes)
    yield _counter("episodes_learnt_total", "Those with an advantage.", learning.learnt_from)
    yield _counter("episodes_dropped_total", "Those that were too old.", learning.dropped)


def _dispatching(status: Status) -> Iterator[_Family]:
    dispatching = status.dispatching
    if dispatching is None:
        return
    workers = dispatching.workers
    yield _counter(
        "turns_dispatched_total", "Turns that workers gave.", sum(w.turns for w in workers)
    )
    yield _counter("turn_failures_total", "Turns not given.", sum(w.failures for w in workers))
    yield _counter("turn_lies_total", "Turns that were not true.", sum(w.lies for w in workers))


def _rollouts(status: Status) -> Iterator[_Family]:
    rollouts = status.rollouts
    if rollouts is None:
        return
    yield _counter("rollouts_served_total", "Answers given to their end.", rollouts.served)
    yield _counter("rollouts_refused_total", "Requests refused.", rollouts.refused)
    yield _counter("rollout_tokens_total", "Tokens generated.", rollouts.tokens)
    yield _gauge("rollout_tokens_per_second", "Tokens generated per second.", rollouts.tokens_per_s)
    yield _gauge(
        "rollout_draft_acceptance_ratio",
        "Share of drafted tokens that the model confirmed.",
        rollouts.draft_acceptance,
    )
    yield _gauge("rollouts_running", "Requests being answered.", rollouts.running)
    yield _gauge("rollouts_waiting", "Requests that wait.", rollouts.waiting)
    yield _gauge("rollout_policy_version", "Merges in the policy.", rollouts.policy_version)
    yield _counter("rollout_restarts_total", "Restarts of a dead worker.", rollouts.restarts)


def _swarm(status: Status) -> Iterator[_Family]:
    synchronizer = status.synchronizer
    alive = sum(member.alive for member in status.members)
    yield _counter("merges_total", "Merges applied by this process.", status.merges_total)
    yield _gauge("first_merge_seconds", "Start to first applied merge.", status.first_merge_s)
    yield _gauge("term", "Term of the synchronizer order.", status.term)
    yield _gauge(
        "is_synchronizer",
        "1 if this node is the synchronizer.",
        synchronizer is not None and synchronizer.is_self,
    )
    if apart := status.disagreement:
        yield _gauge("output_disagreement", "Jensen-Shannon distance to partners.", apart.outputs)
        yield _gauge("parameter_disagreement", "Distance to partners.", apart.parameters)
    yield _gauge("members", "Known members of the run, this node included.", len(status.members))
    yield _gauge("members_alive", "Members heard of recently.", alive)
    fragments = [({"fragment": str(f.index)}, f) for f in status.fragments]
    yield _Family(
        "fragment_version",
        "gauge",
        "Version of the fragment held here.",
        tuple((labels, f.version) for labels, f in fragments),
    )
    yield _Family(
        "fragment_head_version",
        "gauge",
        "Newest version of the fragment known in the swarm.",
        tuple((labels, f.head_version) for labels, f in fragments),
    )
    yield _Family(
        "fragment_in_sync",
        "gauge",
        "1 if the fragment held here is the newest known.",
        tuple((labels, f.state is FragmentSync.IN_SYNC) for labels, f in fragments),
    )
    yield _Family(
        "fragment_damaged_total",
        "counter",
        "How often the copy held here was found damaged in memory.",
        tuple((labels, f.damaged_times) for labels, f in fragments),
    )
    yield _by_label(
        "refusals_total", "Refused messages and payloads, by reason.", "reason", status.refusals
    )


def _machine(status: Status) -> Iterator[_Family]:
    traffic, lag, checkpoint = status.traffic, status.loop_lag, status.checkpoint
    sent = {kind: count.sent_bytes for kind, count in traffic.by_kind.items()}
    received = {kind: count.received_bytes for kind, count in traffic.by_kind.items()}
    yield _counter(
        "network_restarts_total", "Restarts of a dead network process.", status.network.restarts
    )
    yield _counter("sent_bytes_total", "Bytes sent to peers.", traffic.sent_bytes)
    yield _counter("received_bytes_total", "Bytes received from peers.", traffic.received_bytes)
    yield _gauge(
        "upload_limit_bytes_per_second",
        "Bodies leave no faster, for the sake of messages; absent while nothing limits them.",
        traffic.upload_limit_bytes_per_s,
    )
    yield _by_label("sent_by_kind_bytes_total", "Bytes sent, by purpose.", "kind", sent)
    yield _by_label("received_by_kind_bytes_total", "Bytes received, by purpose.", "kind", received)
    milliseconds = {"p50": lag.p50_ms, "p99": lag.p99_ms, "max": lag.max_ms}
    yield _Family(
        "event_loop_lag_seconds",
        "gauge",
        "How late the event loop was recently.",
        tuple(({"stat": stat}, value / 1000) for stat, value in milliseconds.items()),
    )
    yield _gauge(
        "checkpoint_age_seconds", "Seconds since the last save.", checkpoint.last_saved_s_ago
    )
    yield _gauge("checkpoint_bytes", "Bytes of checkpoints on disk.", checkpoint.bytes_on_disk)
    yield _gauge("checkpoint_failed", "1 if the last save failed.", checkpoint.error is not None)


def _counter(name: str, help_text: str, value: float | None) -> _Family:
    return _Family(name, "counter", help_text, (({}, value),))


def _gauge(name: str, help_text: str, value: float | None) -> _Family:
    return _Family(name, "gauge", help_text, (({}, value),))


def _by_label(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> _Family:
    samples = tuple(({label: key}, counts[key]) for key in sorted(counts))
    return _Family(name, "counter", help_text, samples)


def _family_lines(family: _Family) -> Iterator[str]:
    samples = [(labels, value) for labels, value in family.samples if value is not None]
    if not samples:
        return
    name = f"p2pdiloco_{family.name}"
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value in samples:
        yield f"{name}{_label_text(labels)} {_number(value)}"


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(text: str) -> str:
    """A label value; names and reasons may come from strangers and hold anything."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    """As Prometheus reads it: whole numbers exactly, `NaN` and `+Inf` in its spelling."""
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
