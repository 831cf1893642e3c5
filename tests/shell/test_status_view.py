"""The status document and the metrics: stable names, exact sums, text from strangers."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from p2pdiloco_daemon.status import metrics, view
from p2pdiloco_daemon.status.curve import Curve

HOSTILE = '</script><img src=x onerror=alert(1)>"\\\n\u202ename\ud800'

DOCUMENTED_KEYS = """
app_version attempt
checkpoint.bytes_on_disk checkpoint.error checkpoint.last_saved_s_ago
disagreement.curve[] disagreement.outputs disagreement.parameters disagreement.parameters_share
events[].seconds_ago events[].text
dispatching.groups_waiting dispatching.phase dispatching.step dispatching.trajectories.ended
dispatching.trajectories.waiting dispatching.workers[].cached_share
dispatching.workers[].failures dispatching.workers[].last_problem dispatching.workers[].lies
dispatching.workers[].peer dispatching.workers[].tokens dispatching.workers[].turns
first_merge_s
fragments[].digest fragments[].head_version fragments[].index fragments[].local_steps
fragments[].damaged_times fragments[].mended_s_ago fragments[].merged_tokens
fragments[].num_values fragments[].record_digest fragments[].state fragments[].version
held_out_curve[]
learning.drift learning.dropped learning.episodes learning.learnt_from learning.reward
learning.step
learner.compute_queued_s learner.compute_s
learner.device learner.evaluation_s learner.held_out_loss learner.last_error learner.loss
learner.num_parameters
learner.restarts learner.stall_queued_s learner.stall_s learner.stall_share
learner.state learner.step learner.step_s learner.tokens_per_s
loop_lag.max_ms loop_lag.p50_ms loop_lag.p99_ms
loss_curve[]
members[].alive members[].is_self members[].is_synchronizer members[].last_heard_s members[].name
members[].peer members[].ready members[].role members[].step_s members[].tokens_per_s
members[].versions_behind
merges_total network.connected network.last_error network.reach network.restarts
node_name num_members page_url
pacing.answers_total pacing.fragments[].asks_for_time pacing.fragments[].closes
pacing.fragments[].fragment pacing.fragments[].opens pacing.fragments[].reason
pacing.fragments[].steps pacing.policy pacing.pressure.link pacing.quiet.bound_s
pacing.quiet.coverage pacing.quiet.late pacing.relearned pacing.sentence
pacing.syncing.bound_s pacing.syncing.coverage pacing.syncing.late pacing.target_s
peer_id protocol_version
refusals.old_term reward_curve[]
rollouts.draft_acceptance rollouts.last_error rollouts.policy_version rollouts.refused
rollouts.restarts rollouts.running rollouts.served rollouts.state rollouts.tokens
rollouts.tokens_per_s rollouts.waiting
rounds[].attempt rounds[].contributors[] rounds[].duration_s rounds[].fragment rounds[].outcome
rounds[].reason rounds[].seconds_ago rounds[].synchronizer rounds[].term rounds[].version
run.id run.name
sentence state
synchronizer.is_self synchronizer.peer
term
tokens.adds_up tokens.lost.crash tokens.lost_total tokens.merged tokens.pending tokens.processed
tokens.rejected.late tokens.rejected_total tokens.unit
traffic.by_kind.merge.received_bytes traffic.by_kind.merge.sent_bytes
traffic.received_bytes traffic.sent_bytes traffic.upload_limit_bytes_per_s
uptime_s
"""

SAMPLE_LINE = re.compile(
    r"(?P<name>[a-z_][a-z0-9_]*)"
    r'(?:\{(?P<labels>[a-z_]+="(?:[^"\\\n]|\\["\\n])*"(?:,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*)\})?'
    r" (?P<value>[-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|Inf)|NaN)"
)


def status(name: str = "birch") -> view.Status:
    """A status in which every list has an entry and every optional field a value."""
    return view.Status(
        protocol_version=1,
        app_version="0.1.0",
        peer_id="peer-a",
        node_name=name,
        run=view.Run(id="beef", name=name),
        state=view.NodeState.TRAINING,
        sentence="Training with 1 other node.",
        uptime_s=61.5,
        page_url="http://127.0.0.1:8737/",
        learner=view.Learner(
            state=view.LearnerState.TRAINING,
            step=120,
            tokens_per_s=2100.5,
            step_s=0.24,
            loss=2.5,
            held_out_loss=2.6,
            device="cpu",
            num_parameters=1_009_152,
        ),
        loss_curve=[(1, 5.5), (120, 2.5)],
        held_out_curve=[(0, 5.5), (120, 2.6)],
        reward_curve=[(0, 0.01), (1, 0.02)],
        learning=view.Learning(
            step=7, reward=0.25, drift=0.001, episodes=64, learnt_from=48, dropped=8
        ),
        rollouts=view.Rollouts(
            state=view.RolloutState.SERVING,
            served=12,
            refused=1,
            tokens=480,
            tokens_per_s=31.5,
            draft_acceptance=0.75,
            running=2,
            waiting=1,
            policy_version=40,
            restarts=1,
            last_error="the rollout worker ended: killed by SIGKILL",
        ),
        dispatching=view.Dispatching(
            step=7,
            phase="rolling out",
            trajectories={"waiting": 3, "ended": 125},
            groups_waiting=2,
            workers=[
                view.DispatchedWorker(
                    peer="peer-b",
                    turns=90,
                    tokens=180,
                    cached_share=0.75,
                    failures=1,
                    lies=1,
                    last_problem="its reward is another (token 7)",
                )
            ],
        ),
        tokens=view.TokenLedger(
            processed=100, merged=70, pending=20, rejected={"late": 7}, lost={"crash": 3}
        ),
        merges_total=12,
        first_merge_s=31.0,
        term=3,
        attempt=1,
        synchronizer=view.Synchronizer(peer="peer-b", is_self=False),
        disagreement=view.Disagreement(
            outputs=0.1, parameters=2.5, parameters_share=0.02, curve=((7, 0.1),)
        ),
        rounds=[
            view.Round(
                fragment=0,
                version=4,
                term=3,
                attempt=1,
                synchronizer="peer-b",
                contributors=["peer-a", "peer-b"],
                outcome="merged",
                reason="Closed: everybody had reported.",
                seconds_ago=2.0,
                duration_s=1.5,
            )
        ],
        pacing=view.Pacing(
            policy="calibrated",
            sentence="sync of fragment 0 at step 9 of 12",
            pressure={"link": 0.5},
            fragments=[
                view.NextSync(
                    fragment=0, steps=9, opens=12, closes=16, asks_for_time=False, reason="soon"
                )
            ],
            target_s=0.2,
            quiet=view.Bound(bound_s=0.1, late=0.01, coverage=0.95),
            syncing=view.Bound(bound_s=float("inf"), late=0.2, coverage=0.94),
        ),
        fragments=[
            view.Fragment(
                index=0,
                version=4,
                head_version=5,
                state=view.FragmentSync.BEHIND,
                num_values=32_768,
                digest="abcdef",
                record_digest="fedcba",
                local_steps=9,
            )
        ],
        members=[view.Member(peer="peer-b", name=name, is_synchronizer=True)],
        traffic=view.Traffic(
            sent_bytes=10,
            received_bytes=20,
            by_kind={"merge": view.ByteCount(sent_bytes=10, received_bytes=20)},
        ),
        loop_lag=view.LoopLag(p50_ms=0.5, p99_ms=4.0, max_ms=12.0),
        refusals={"old_term": 2},
        checkpoint=view.Checkpoint(last_saved_s_ago=5.0, bytes_on_disk=1000),
        events=[view.Event(seconds_ago=1.0, text="Merge applied.")],
    )


def key_paths(value: object, path: str = "") -> set[str]:
    if isinstance(value, dict):
        inner = [key_paths(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()]
        return set().union(*inner) if inner else {path}
    if isinstance(value, list) and not path.endswith("curve"):
        return set().union(*(key_paths(item, f"{path}[]") for item in value))
    return {f"{path}[]"} if isinstance(value, list) else {path}


def samples(text: str) -> dict[str, float]:
    """Metric lines by name and labels, each checked against the exposition format."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE_LINE.fullmatch(line)
            assert match, line
            key = match["name"].removeprefix("p2pdiloco_")
            key += "{" + match["labels"] + "}" if match["labels"] else ""
            assert key not in found, line
            found[key] = float(match["value"])
    return found


def test_the_names_in_the_document_are_the_documented_ones() -> None:
    assert sorted(key_paths(status().to_json())) == sorted(DOCUMENTED_KEYS.split())


def test_the_document_is_plain_json() -> None:
    document = status().to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["state"] == "training"
    assert document["fragments"][0]["state"] == "behind"
    assert document["loss_curve"] == [[1, 5.5], [120, 2.5]]


def test_the_ledger_adds_up_only_exactly() -> None:
    ledger = view.TokenLedger(processed=10, merged=6, pending=1, rejected={"late": 2, "nan": 1})
    assert ledger.adds_up
    assert ledger.rejected_total == 3
    assert not view.TokenLedger(processed=10, merged=9).adds_up


def test_numbers_that_json_cannot_write_become_null() -> None:
    document = view.Status(
        protocol_version=1,
        app_version="0",
        peer_id="p",
        node_name="n",
        run=view.Run(id="r", name="r"),
        state=view.NodeState.STARTING,
        sentence="Starting.",
        uptime_s=0.0,
        learner=view.Learner(loss=math.nan, held_out_loss=math.inf),
        loss_curve=[(1, math.nan)],
    ).to_json()
    assert document["learner"]["loss"] is None
    assert document["learner"]["held_out_loss"] is None
    assert document["loss_curve"] == [[1, None]]


def test_lists_are_bounded_and_keep_their_newest() -> None:
    full = status()
    long = dataclasses.replace(
        full,
        loss_curve=[(step, 1.0) for step in range(2000)],
        rounds=list(full.rounds) * 100,
        events=[view.Event(seconds_ago=float(i), text=str(i)) for i in range(200)],
        members=list(full.members) * 3000,
    ).to_json()
    assert len(long["loss_curve"]) == view.CURVE_POINTS_MAX
    assert long["loss_curve"][-1] == [1999, 1.0]
    assert len(long["rounds"]) == view.ROUNDS_MAX
    assert [event["text"] for event in long["events"]] == [str(i) for i in range(view.EVENTS_MAX)]
    assert len(long["members"]) == view.MEMBERS_MAX
    assert long["num_members"] == 3000


def test_metrics_say_what_the_document_says() -> None:
    found = samples(metrics.metrics_text(status()))
    assert found["merges_total"] == 12
    assert found["held_out_loss"] == 2.6
    assert found['tokens_rejected_total{reason="late"}'] == 7
    assert found["tokens_add_up"] == 1
    assert found['fragment_version{fragment="0"}'] == 4
    assert found['fragment_in_sync{fragment="0"}'] == 0
    assert found['event_loop_lag_seconds{stat="p99"}'] == 0.004
    assert found['state{state="training"}'] == 1
    assert found['state{state="isolated"}'] == 0
    assert found['received_by_kind_bytes_total{kind="merge"}'] == 20


def test_every_metric_has_one_help_one_type_and_counters_end_in_total() -> None:
    text = metrics.metrics_text(status())
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = re.findall(r"^# HELP (\S+) .+$", text, re.MULTILINE)
    sampled = {f"p2pdiloco_{key.partition('{')[0]}" for key in samples(text)}
    assert sorted(types) == sorted(helps) == sorted(sampled)
    assert {name for name, kind in types.items() if kind == "counter"} == {
        name for name in types if name.endswith("_total")
    }
    assert text.endswith("\n")


def test_a_hostile_name_stays_inside_its_metric_label() -> None:
    text = metrics.metrics_text(status(HOSTILE))
    info = [key for key in samples(text) if key.startswith("info{")]
    assert len(info) == 1
    assert r"alert(1)>\"\\\n" in info[0]


def test_a_hostile_name_is_only_a_string_in_the_document() -> None:
    text = json.dumps(status(HOSTILE).to_json())
    assert json.loads(text)["members"][0]["name"] == HOSTILE


@pytest.mark.parametrize("num_values", [0, 1, 499, 500, 501, 12_345])
def test_a_curve_keeps_its_bound_its_end_and_its_mean(num_values: int) -> None:
    curve = Curve()
    for step in range(1, num_values + 1):
        curve.add(step, float(step))
    points = curve.points()
    assert len(points) == num_values if num_values < 500 else len(points) <= view.CURVE_POINTS_MAX
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert not num_values or points[-1][0] == num_values


def test_a_full_curve_averages_neighbours() -> None:
    curve = Curve()
    for step in range(1, view.CURVE_POINTS_MAX + 1):
        curve.add(step, float(step))
    assert curve.points()[:2] == ((2, 1.5), (4, 3.5))
