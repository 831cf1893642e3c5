"""`p2pdiloco join [INVITE]`: a node, in the foreground, until Ctrl-C."""

import argparse
import asyncio
import os
import time
from pathlib import Path

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.invite import parse_invite
from p2pdiloco_daemon.cli.directories import last_node, node_directory, remember_last_node
from p2pdiloco_daemon.cli.ports import STATUS_PORT, host_and_port, port_number, require_free
from p2pdiloco_daemon.rollouts.backends import BACKENDS, TORCH, require_backend
from p2pdiloco_daemon.signals import add_supervisor_option


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "join",
        help="take part in a run",
        description="Runs a node that trains in the run of the INVITE until you press Ctrl-C "
        "(twice: stop at once). Without INVITE it goes on with the run joined last. It needs no "
        "account and no open port, and writes only into its directory. Its status page says what "
        "it is doing.",
    )
    parser.add_argument(
        "invite",
        nargs="?",
        metavar="INVITE",
        help="the line starting with p2pdiloco: that the run's owner sent",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory of the node: its key, checkpoints and log (default: one per run under "
        "the person's data directory, which a later `join` without INVITE finds again)",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        default=STATUS_PORT,
        help="port of the status page, on this machine only (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="where to train: auto, cpu, cuda, cuda:1, mps (default: auto, the fastest there is)",
    )
    parser.add_argument(
        "--threads", type=thread_count, default=1, help="CPU threads to train with (default: 1)"
    )
    parser.add_argument(
        "--rollouts",
        action="store_true",
        help="answer POST /v1/completions on the port of the status page, and of the other nodes, "
        "with the model as it is trained (takes memory for a second copy, as every node of a run "
        "that learns from rollouts does in any case)",
    )
    parser.add_argument(
        "--rollout-backend",
        choices=BACKENDS,
        default=TORCH,
        help="what generates: p2pdiloco's own engine, or vLLM, for which `pip install "
        "p2pdiloco[vllm]` is needed; the tokens are the same (default: %(default)s)",
    )
    parser.add_argument(
        "--listen",
        type=host_and_port,
        default=("0.0.0.0", 0),
        metavar="HOST:PORT",
        help="address for the other nodes (default: any address, any free port)",
    )
    add_supervisor_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    require_backend(arguments.rollout_backend)
    directory = _directory(arguments.invite, arguments.dir)
    require_free("127.0.0.1", arguments.port, "--port")
    host, port = arguments.listen
    require_free(host, port, "--listen")
    if arguments.dir is None:
        remember_last_node(directory)

    # read once, as torch is imported, and children are forked from what has imported it
    os.environ.update(OMP_NUM_THREADS=str(arguments.threads), GOMP_SPINCOUNT="0")

    # imported late: hivemind and torch take seconds, and a wrong invite should be told at once
    from p2pdiloco_daemon.app import NodeOptions, run_node
    from p2pdiloco_daemon.children.forkserver import running_forkserver
    from p2pdiloco_daemon.learner.device import choose_device

    with running_forkserver() as forkserver:
        options = NodeOptions(
            directory=directory,
            invite=arguments.invite,
            status_port=arguments.port,
            listen=(host, port),
            device=choose_device(arguments.device),
            threads=arguments.threads,
            rollouts=arguments.rollouts,
            rollout_backend=arguments.rollout_backend,
            supervisor_fd=arguments.supervisor_fd,
            forkserver=forkserver,
        )
        asyncio.run(run_node(options))
    return 0


def thread_count(text: str) -> int:
    """argparse type: at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of threads from 1, got {text!r}")
    return int(text)


def _directory(invite: str | None, chosen: Path | None) -> Path:
    if invite is None:
        directory = chosen or last_node()
        if not directory.is_dir():
            raise UserError(
                f"there is no node in {directory}; give its invite: p2pdiloco join INVITE --dir ..."
            )
        return directory
    run_id = parse_invite(invite, time.time()).run_id
    return chosen or node_directory(run_id)
