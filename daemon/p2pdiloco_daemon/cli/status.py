"""`p2pdiloco status`: what the node on this machine is doing."""

import argparse
import json
import urllib.error
import urllib.request
from http.client import HTTPException

from p2pdiloco.errors import UserError
from p2pdiloco_daemon.cli.ports import STATUS_PORT, port_number
from p2pdiloco_daemon.status.view import JsonObject, LearnerState

_TIMEOUT_S = 5.0
"""A node answers from memory in milliseconds; on a machine that is swapping it may take seconds."""

_STATUS_BYTES_MAX = 4 << 20


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="show what the node on this machine is doing",
        description="Asks the node on this machine what it is doing and prints it. The same is on "
        "its status page.",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        default=STATUS_PORT,
        help="port of the node's status page (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the whole status as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    status = read_status(arguments.port)
    print(json.dumps(status) if arguments.json else "\n".join(summary(status)))
    return 0


def read_status(port: int) -> JsonObject:
    """The status document of the node whose page is on `port`; UserError where there is none."""
    url = f"http://127.0.0.1:{port}/api/status"
    try:
        # loopback never goes through a proxy
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            status = json.loads(response.read(_STATUS_BYTES_MAX))
    except urllib.error.HTTPError as error:
        raise UserError(_not_a_node(port, f"it answers with HTTP {error.code}")) from error
    except TimeoutError as error:
        raise UserError(
            f"the program on port {port} takes connections but said nothing for {_TIMEOUT_S:.0f} "
            "s; it hangs, or the machine is overloaded; look at its log"
        ) from error
    except OSError as error:
        raise UserError(
            f"no node answers on port {port} of this machine; start one with `p2pdiloco join`, "
            "or name the port of its status page with --port"
        ) from error
    except HTTPException as error:
        raise UserError(_not_a_node(port, "it answers with something else than HTTP")) from error
    except (ValueError, RecursionError) as error:
        raise UserError(_not_a_node(port, "it answers with something else than JSON")) from error
    if not isinstance(status, dict) or "peer_id" not in status:
        raise UserError(_not_a_node(port, "its answer is not a node's status"))
    return status


def summary(status: JsonObject) -> list[str]:
    """A dozen lines for a person."""
    learner, tokens = status["learner"], status["tokens"]
    others = [member for member in status["members"] if member["alive"] and not member["is_self"]]
    ledger = (
        f"{tokens['processed']} processed = {tokens['merged']} merged + {tokens['pending']} "
        f"pending + {tokens['rejected_total']} rejected + {tokens['lost_total']} lost "
        f"({tokens['unit']})"
    )
    sent, received = (in_bytes(status["traffic"][f"{way}_bytes"]) for way in ("sent", "received"))
    lines = [
        status["sentence"],
        f"run           {status['run']['name']} ({status['run']['id']})",
        f"node          {status['node_name']} ({status['peer_id']})",
        f"state         {status['state']}, learner {learner['state']}",
        f"device        {learner['device'] or 'not known yet'}",
        f"step          {learner['step']}, {_rate(learner['tokens_per_s'])}",
        _progress(status),
        f"merges        {status['merges_total']}, {_newest_round(status)}",
        f"others        {len(others)} alive",
        _leads(status),
        f"tokens        {ledger}",
        f"traffic       {sent} sent, {received} received",
    ]
    if learner["last_error"] and learner["state"] == LearnerState.RESTARTING:
        lines.append(f"problem       {learner['last_error']}")
    if status["checkpoint"]["error"]:
        lines.append(f"checkpoint    {status['checkpoint']['error']}")
    if status["page_url"]:
        lines.append(f"page          {status['page_url']}")
    return lines


def in_bytes(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _progress(status: JsonObject) -> str:
    learner, learning = status["learner"], status["learning"]
    if learning is None:
        held_out = _number(learner["held_out_loss"])
        return f"loss          {_number(learner['loss'])}, held out {held_out}"
    step = "no step yet" if learning["step"] is None else f"of step {learning['step']}"
    return f"reward        {_number(learning['reward'])}, {step}"


def _newest_round(status: JsonObject) -> str:
    return f"last: {status['rounds'][0]['reason']}" if status["rounds"] else "no round yet"


def _leads(status: JsonObject) -> str:
    if (apart := status["disagreement"]) is None:
        return f"synchronizer  {_synchronizer(status['synchronizer'])} (term {status['term']})"
    return f"disagreement  {_number(apart['outputs'])} in outputs, without a synchronizer"


def _synchronizer(synchronizer: JsonObject | None) -> str:
    if synchronizer is None:
        return "not known yet"
    return "this node" if synchronizer["is_self"] else str(synchronizer["peer"])


def _number(value: float | None) -> str:
    return "not known yet" if value is None else f"{value:.3f}"


def _rate(tokens_per_s: float | None) -> str:
    return "speed not known yet" if tokens_per_s is None else f"{tokens_per_s:.0f} tokens/s"


def _not_a_node(port: int, problem: str) -> str:
    return (
        f"port {port} of this machine belongs to another program than p2pdiloco: {problem}; "
        "name the port of the node's status page with --port"
    )
