"""The demo's arithmetic: the verdict, what counts as settled, what is shown."""

import asyncio
import dataclasses
import io
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from rich.console import Console

from p2pdiloco_daemon.cli.demo import report
from p2pdiloco_daemon.demo.display import newest_round, plain_line, view
from p2pdiloco_daemon.demo.evaluation import Findings
from p2pdiloco_daemon.demo.polling import StatusReader
from p2pdiloco_daemon.demo.processes import NodeProcess
from p2pdiloco_daemon.demo.supervisor import StopRequests, has_model
from p2pdiloco_daemon.demo.verdict import APART_MAX, NodeOutcome, all_is_well, result
from p2pdiloco_daemon.status.view import (
    Disagreement,
    Fragment,
    FragmentSync,
    JsonObject,
    Learner,
    Learning,
    NodeState,
    Round,
    Run,
    Status,
    Synchronizer,
    TokenLedger,
)

LEDGER = TokenLedger(processed=20, merged=10, pending=5, rejected={"late": 3}, lost={"crash": 2})


def fragment(version: int = 4, head_version: int = 4) -> Fragment:
    return Fragment(
        index=0,
        version=version,
        head_version=head_version,
        state=FragmentSync.IN_SYNC,
        num_values=10,
        record_digest=f"record {version}",
    )


STATUS = Status(
    protocol_version=1,
    app_version="0.1.0",
    peer_id="peer",
    node_name="node",
    run=Run(id="ab" * 16, name="demo"),
    state=NodeState.SETTLED,
    sentence="Settled.",
    uptime_s=60.0,
    learner=Learner(step=7, loss=1.5, stall_share=0.002),
    tokens=LEDGER,
    merges_total=4,
    first_merge_s=11.0,
    synchronizer=Synchronizer(peer="peer", is_self=True),
    fragments=(fragment(),),
)


def findings(*digests: str, disagreement: float = 0.0) -> Findings:
    return Findings(
        loss_before=5.5,
        loss_after=1.4,
        sample="And it came to pass",
        checkpoint="/somewhere",
        state_digests={f"node-{i}": [digest] for i, digest in enumerate(digests, 1)},
        disagreement=disagreement,
        tokens_in_records=20,
    )


def outcome(name: str, status: Status = STATUS, end: str | None = None) -> NodeOutcome:
    return NodeOutcome(name, status.to_json(), end, settled=True)


@dataclasses.dataclass
class FakeProcess:
    returncode: int | None = None


def node(index: int, returncode: int | None = None) -> NodeProcess:
    process = cast("asyncio.subprocess.Process", FakeProcess(returncode))
    return NodeProcess(Path(f"/d/node-{index}"), 8700 + index, process)


def test_identical_nodes_whose_ledgers_add_up_are_well() -> None:
    told = result(findings("a", "a"), [outcome("node-1"), outcome("node-2")])
    assert all_is_well(told)
    assert told["anchors_identical"] is True
    assert told["merges"] == 4
    assert told["first_merge_s"] == 11.0
    assert told["stall_share"] == 0.002
    assert told["tokens"] == {
        "processed": 40,
        "merged": 20,
        "pending": 10,
        "rejected": 6,
        "lost": 4,
    }


def test_nodes_that_differ_are_not_well() -> None:
    told = result(findings("a", "b"), [outcome("node-1"), outcome("node-2")])
    assert told["anchors_identical"] is False
    assert not all_is_well(told)


def test_nodes_that_gossip_may_differ_but_not_go_different_ways() -> None:
    gossips = dataclasses.replace(STATUS, disagreement=Disagreement(parameters=1.0))
    nodes = [outcome("node-1", gossips), outcome("node-2", gossips)]
    assert all_is_well(result(findings("a", "b", disagreement=0.02), nodes))
    assert not all_is_well(result(findings("a", "b", disagreement=APART_MAX + 0.1), nodes))


def test_a_ledger_that_misses_one_token_is_not_well() -> None:
    short = dataclasses.replace(STATUS, tokens=dataclasses.replace(LEDGER, merged=9))
    told = result(findings("a", "a"), [outcome("node-1"), outcome("node-2", short)])
    assert told["ledger_adds_up"] is False
    assert not all_is_well(told)


def test_two_ledgers_whose_errors_cancel_are_not_well() -> None:
    more = dataclasses.replace(STATUS, tokens=dataclasses.replace(LEDGER, merged=11))
    less = dataclasses.replace(STATUS, tokens=dataclasses.replace(LEDGER, merged=9))
    told = result(findings("a", "a"), [outcome("node-1", more), outcome("node-2", less)])
    assert not all_is_well(told)


def test_what_a_killed_node_had_pending_is_lost() -> None:
    killed = outcome("node-2", end="killed by SIGKILL")
    told = result(findings("a"), [outcome("node-1"), killed])
    assert all_is_well(told)
    assert (told["tokens"]["pending"], told["tokens"]["lost"]) == (5, 9)
    assert told["nodes"][1]["end"] == "killed by SIGKILL"


def test_a_demo_in_which_nobody_lived_is_not_well() -> None:
    assert not all_is_well(result(findings("a"), [outcome("node-1", end="exited with 1")]))


def test_a_demo_without_a_merge_is_not_well() -> None:
    early = dataclasses.replace(STATUS, fragments=(fragment(0, 0),), first_merge_s=None)
    told = result(findings("a"), [outcome("node-1", early)])
    assert not all_is_well(told)
    assert "merges         0; run it longer" in report(told)


def test_the_report_names_what_matters() -> None:
    text = "\n".join(report(result(findings("a", "a"), [outcome("node-1"), outcome("node-2")])))
    assert "5.500 -> 1.400 nats per byte" in text
    assert "identical to the last bit on all 2 living nodes, momenta too" in text
    assert "40 processed = 20 merged + 10 pending + 6 rejected + 4 lost\n" in text


def test_the_report_of_a_run_that_learns_from_rollouts_tells_the_reward() -> None:
    found = findings("a", "a").model_copy(
        update={
            "loss_before": None,
            "loss_after": None,
            "reward_before": 0.02,
            "reward_after": 0.5,
            "sample": "Guess 0 to 9.\n5more\n",
        }
    )
    told = result(found, [outcome("node-1"), outcome("node-2")])
    assert all_is_well(told)
    text = "\n".join(report(told))
    assert "0.020 -> 0.500 of 1, on tasks that it has not seen" in text
    assert "--prompt 'Guess 0 to 9.'" in text


def test_the_view_of_a_run_that_learns_from_rollouts_shows_the_reward() -> None:
    learning = dataclasses.replace(STATUS, learning=Learning(reward=0.25, drift=0.0125))
    console = Console(width=150, file=io.StringIO())
    console.print(view([node(1)], {"node-1": learning.to_json()}, "0:01 of training"))
    shown = cast("io.StringIO", console.file).getvalue().split()
    assert "held" not in shown
    assert shown[shown.index("reward") + 1] == "drift"
    assert {"0.250", "0.0125"} <= set(shown)
    assert "reward 0.250" in plain_line([node(1)], {"node-1": learning.to_json()}, "0:01")


@pytest.mark.parametrize(
    ("statuses", "settled"),
    [
        ([STATUS, STATUS], True),
        ([STATUS, dataclasses.replace(STATUS, state=NodeState.TRAINING)], False),
        ([STATUS, dataclasses.replace(STATUS, fragments=(fragment(3),))], False),
        ([STATUS], False),
    ],
)
def test_all_living_nodes_must_settle_on_the_same_heads(
    statuses: list[Status], settled: bool
) -> None:
    reader = StatusReader(cast("aiohttp.ClientSession", None), [node(1), node(2), node(3, -9)])
    reader.latest = {f"node-{i}": status.to_json() for i, status in enumerate(statuses, 1)}
    assert reader.settled() is settled


def test_a_node_that_has_not_received_the_model_has_no_outcome() -> None:
    for fragments in ((), (fragment(0, 0), fragment(-1, 0))):
        assert not has_model(dataclasses.replace(STATUS, fragments=fragments).to_json())
    assert has_model(dataclasses.replace(STATUS, fragments=(fragment(0, 0),)).to_json())


def test_interrupts_stop_then_hurry_then_drop_everything() -> None:
    cancelled: list[bool] = []
    requests = StopRequests(lambda: cancelled.append(True))
    requests.add()
    assert (requests.stop.is_set(), requests.hurry.is_set()) == (True, False)
    requests.add()
    assert (requests.hurry.is_set(), cancelled) == (True, [])
    requests.add()
    requests.add()
    assert cancelled == [True]


def test_the_view_shows_every_node() -> None:
    statuses: dict[str, JsonObject] = {"node-1": STATUS.to_json(), "node-3": STATUS.to_json()}
    console = Console(width=150, file=io.StringIO())
    console.print(view([node(1), node(2), node(3, -9)], statuses, "0:01 of training"))
    rows = [
        line.split()
        for line in cast("io.StringIO", console.file).getvalue().splitlines()
        if "node-" in line
    ]
    assert rows[0][:5] == ["node-1", "*", "settled", "7", "1.500"]
    assert rows[1][:2] == ["node-2", "starting"]
    assert rows[2][:5] == ["node-3", "killed", "by", "SIGKILL", "7"]


def test_the_newest_round_of_all_nodes_is_told() -> None:
    old, new = (
        Round(
            fragment=0,
            version=version,
            term=1,
            attempt=0,
            synchronizer="peer",
            contributors=("a", "b"),
            outcome="merged",
            reason="all 2 members were ready",
            seconds_ago=seconds_ago,
        )
        for version, seconds_ago in ((8, 3.0), (9, 1.0))
    )
    statuses = {
        name: dataclasses.replace(STATUS, rounds=(newest,)).to_json()
        for name, newest in (("node-1", old), ("node-2", new))
    }
    assert newest_round(statuses) == (
        "fragment 0 version 9: merged, 2 contributors, all 2 members were ready"
    )
    assert newest_round({}) == "no merge yet"
