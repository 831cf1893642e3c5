"""`p2pdiloco demo`: several real nodes on this machine train one model together."""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco.errors import UserError
from p2pdiloco.spec import DataSpec, InnerSpec, OuterSpec, RlSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.children.forkserver import COMMANDS, running_forkserver
from p2pdiloco_daemon.cli.directories import data_directory
from p2pdiloco_daemon.cli.new import write_draft
from p2pdiloco_daemon.cli.ports import STATUS_PORT, port_number, require_free
from p2pdiloco_daemon.demo.display import Display
from p2pdiloco_daemon.demo.processes import Home
from p2pdiloco_daemon.demo.supervisor import DemoOptions, run_demo
from p2pdiloco_daemon.demo.verdict import all_is_well
from p2pdiloco_daemon.status.view import JsonObject

NODES_MAX = 16
"""More training processes than that on one machine show nothing but a slow machine."""

_SYNC: dict[str, dict[str, object]] = {
    "quorum": {"strategy": "quorum"},
    "gossip": {"strategy": "gossip"},
    "factored": {"strategy": "factored", "quorum": 2, "num_fragments": 1},
    "diloco": {"strategy": "diloco", "num_fragments": 1},
}
"""What a demo of each strategy begins with."""

GUESSING = RunSpec(
    name="demo",
    data=DataSpec(sequence_length=96),
    inner=InnerSpec(learning_rate=2e-3, warmup_steps=10, weight_decay=0.0),
    outer=OuterSpec(learning_rate=1.0, momentum=0.0),
    sync=SyncSpec(num_fragments=1, inner_steps=4),
    rl=RlSpec(),
)
"""What a demo that learns from rollouts begins with."""

_SPEC_FILE = "run.toml"


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a demo keeps its things."""

    work: Path
    checkpoint: Path
    temporary: bool
    """Whether `work` goes when all was well."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="watch several nodes on this machine train one model together",
        description="Starts a bootstrap peer and several nodes on this machine, each a process of "
        "its own with its own identity, learner and status page. They find each other and train a "
        "small language model on the King James Bible, or on a guessing game. Kill one while it "
        "runs: the others go on. Ctrl-C ends the demo cleanly and prints what came out; press it "
        "again to hurry.",
    )
    parser.add_argument(
        "--nodes", type=_node_count, default=3, help="how many nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=_minutes, help="end after this many minutes (default: at Ctrl-C)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="keep everything in this directory; a second demo in it goes on where the first ended "
        "(default: a temporary one, of which the checkpoint is kept)",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        default=STATUS_PORT,
        help="port of the first node's status page, the others follow (default: %(default)s)",
    )
    parser.add_argument(
        "--strategy",
        choices=sorted(_SYNC),
        help="how the nodes of a new demo train together (default: quorum)",
    )
    parser.add_argument(
        "--task",
        choices=("text", "rl"),
        help="what a new demo learns: text, or to guess a number, from what its nodes roll out "
        "(default: text)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the outcome as one JSON object on the last line"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for port in range(arguments.port, arguments.port + arguments.nodes):
        require_free("127.0.0.1", port, "--port")
    places = _make_places(arguments.dir, _draft(arguments.strategy, arguments.task))
    os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="0")  # as `join` has it
    display = Display()
    try:
        with running_forkserver(COMMANDS) as forkserver:
            options = DemoOptions(
                spec_file=places.work / _SPEC_FILE,
                directory=places.work,
                checkpoint=places.checkpoint,
                num_nodes=arguments.nodes,
                first_port=arguments.port,
                minutes=arguments.minutes,
                home=Home(forkserver=forkserver),
            )
            outcome = asyncio.run(run_demo(options, display))
    except (KeyboardInterrupt, asyncio.CancelledError):  # broken off: nothing is to be looked into
        if places.temporary:
            shutil.rmtree(places.work)
        raise
    well = all_is_well(outcome)
    if places.temporary and well:
        shutil.rmtree(places.work)
    else:
        display.say(f"logs and directories of the nodes: {places.work}")
    print(json.dumps(outcome) if arguments.json else "\n".join(report(outcome)))
    return 0 if well else 1


def report(outcome: JsonObject) -> list[str]:
    """The outcome for a person."""
    tokens = outcome["tokens"]
    first_merge_s = outcome["first_merge_s"]
    first = f", the first after {first_merge_s:.0f} s" if first_merge_s else "; run it longer"
    ledger = (
        f"{tokens['processed']} processed = {tokens['merged']} merged + {tokens['pending']} "
        f"pending + {tokens['rejected']} rejected + {tokens['lost']} lost"
    )
    return [
        "",
        _learnt(outcome),
        f"merges         {outcome['merges']}{first}",
        f"stall          at most {outcome['stall_share']:.2%} of a learner's time",
        f"anchors        {_anchors(outcome)}",
        f"tokens         {ledger}{'' if outcome['ledger_adds_up'] else ' (DOES NOT ADD UP)'}",
        f"checkpoint     {outcome['checkpoint']}",
        f"try it         p2pdiloco sample {outcome['checkpoint']} --prompt '{_prompt(outcome)}'",
        "",
        outcome["sample"],
    ]


def _learnt(outcome: JsonObject) -> str:
    if outcome["reward_after"] is not None:
        rewards = f"{outcome['reward_before']:.3f} -> {outcome['reward_after']:.3f}"
        return f"reward         {rewards} of 1, on tasks that it has not seen"
    losses = f"{outcome['loss_before']:.3f} -> {outcome['loss_after']:.3f}"
    return f"held-out loss  {losses} nats per byte"


def _anchors(outcome: JsonObject) -> str:
    living = sum(node["end"] is None for node in outcome["nodes"])
    if outcome["gossips"]:
        return f"{outcome['disagreement']:.2%} apart on {living} living nodes, which gossip"
    if outcome["anchors_identical"]:
        return f"identical to the last bit on all {living} living nodes, momenta too"
    return "DIFFER between the nodes; --json lists their digests"


def _prompt(outcome: JsonObject) -> str:
    return "And God said" if outcome["reward_after"] is None else outcome["sample"].split("\n")[0]


def _draft(strategy: str | None, task: str | None) -> RunSpec | None:
    """Of a new demo; None if nothing was said of it."""
    if task == "rl":
        if strategy not in (None, "quorum"):
            raise UserError(f"--task rl is learnt with --strategy quorum, got {strategy}")
        return GUESSING
    if strategy is None and task is None:
        return None
    return RunSpec(name="demo", sync=SyncSpec.model_validate(_SYNC[strategy or "quorum"]))


def _make_places(directory: Path | None, draft: RunSpec | None) -> _Places:
    """Makes the directories; with a new spec where there is none yet."""
    try:
        if directory is None:
            parent = data_directory() / "demo"
            parent.mkdir(parents=True, exist_ok=True)
            places = _Places(
                Path(tempfile.mkdtemp(prefix="run-", dir=parent)), parent / "checkpoint", True
            )
        else:
            directory.mkdir(parents=True, exist_ok=True)
            work = directory.resolve()
            places = _Places(work, work / "checkpoint", False)
        continues = (places.work / _SPEC_FILE).exists()
        if not continues and any(places.work.iterdir()):
            raise UserError(
                f"{places.work} is not empty and holds no demo; name an empty or a new directory"
            )
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be used for the demo ({error.strerror}); name another --dir"
        ) from error
    if continues and draft:
        raise UserError(
            f"{places.work} holds a demo already; --strategy and --task are for a new one"
        )
    if not continues:
        write_draft(places.work / _SPEC_FILE, draft or RunSpec(name="demo"))
    return places


def _node_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= NODES_MAX:
        raise argparse.ArgumentTypeError(f"expected 1 to {NODES_MAX} nodes, got {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of minutes above 0, got {text!r}")
    return minutes
