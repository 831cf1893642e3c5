"""`p2pdiloco bootstrap FILE`: makes a run of its description and runs its first peer."""

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.errors import UserError
from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco.spec_file import read_spec_file
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_daemon.cli.directories import bootstrap_directory
from p2pdiloco_daemon.cli.new import owner_key_path
from p2pdiloco_daemon.cli.ports import port_number, require_free
from p2pdiloco_daemon.genesis import genesis_path, prepare_run
from p2pdiloco_daemon.signals import add_supervisor_option, stop_signals
from p2pdiloco_daemon.storage.files import lock_directory

if TYPE_CHECKING:
    from p2pdiloco_bootstrap.app import BootstrapOptions, FirstPeer

PORT = 8600
"""TCP port of the first peer: one fixed number to open or forward."""

INVITE_DAYS = 30
"""How long an invite is good; `bootstrap` prints a new one at each start."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bootstrap",
        help="start a run: its first peer, and the invite to it",
        description="Makes the first weights of the run that FILE describes, signs the run with "
        "the owner's key beside FILE, and stays the peer through which others find the run until "
        "you press Ctrl-C. It does not train: `p2pdiloco join` does. Prints the invite. Once nodes "
        "have joined they find each other without it.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="as `p2pdiloco new` wrote it")
    parser.add_argument(
        "--listen",
        default="0.0.0.0",
        metavar="HOST",
        help="IP address to be reached at (default: all of this machine's)",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        default=PORT,
        help="port for the other nodes; open it to the outside (default: %(default)s)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory of the peer: its key and the first weights (default: one per run name "
        "under the person's data directory)",
    )
    add_supervisor_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    draft = read_spec_file(arguments.file)
    owner = _read_owner(owner_key_path(arguments.file))
    require_free(arguments.listen, arguments.port, "--port")
    directory: Path = arguments.dir or bootstrap_directory(draft.name)
    with lock_directory(directory):
        print("making the first weights, or finding them ...", file=sys.stderr, flush=True)
        signed = prepare_run(draft, owner, directory)
        asyncio.run(serve(arguments, owner, signed, directory))
    return 0


async def serve(
    arguments: argparse.Namespace, owner: Identity, signed: SignedSpec, directory: Path
) -> None:
    """Runs the first peer until one of `stop_signals`; NetworkError when p2pd does not stay."""
    # imported late: hivemind takes seconds, and a mistake in the spec should be told at once
    from p2pdiloco_bootstrap.app import BootstrapOptions

    options = BootstrapOptions(
        directory=directory,
        listen=arguments.listen,
        port=arguments.port,
        signed_spec=signed.pack(),
        genesis={p: genesis_path(directory, p) for p in range(signed.spec.sync.num_fragments)},
    )
    with stop_signals(arguments.supervisor_fd) as stop:
        keeping = asyncio.create_task(_keep_up(options, owner, signed), name="first peer")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait((keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
        keeping.cancel()
        stopping.cancel()
        await asyncio.wait((keeping, stopping))
        if not keeping.cancelled():
            keeping.result()


async def _keep_up(options: "BootstrapOptions", owner: Identity, signed: SignedSpec) -> None:
    """The first peer, and another one whenever its p2pd has ended; never returns."""
    from p2pdiloco_bootstrap.app import running_bootstrap
    from p2pdiloco_daemon.network import Deaths, first_start_failed, reason_of

    deaths, loop, was_up = Deaths(), asyncio.get_running_loop(), False
    while True:
        started = loop.time()
        async with AsyncExitStack() as stack:
            try:
                peer = await stack.enter_async_context(running_bootstrap(options))
                addresses = await peer.host.addresses()
                invite = await peer.invite(owner, time.time() + INVITE_DAYS * 86400)
            except (UserError, OSError) as error:
                if not was_up:
                    raise first_start_failed(error) from error
                reason = reason_of(error)
            else:
                was_up = True
                for line in _welcome(signed, invite, addresses):
                    print(line, flush=True)
                # whoever has the invite looks for us at the same port
                options = dataclasses.replace(options, port=_port_of(addresses[0]))
                reason = await _end_of(peer)
        delay_s = deaths.one_more(reason, loop.time() - started)
        print(f"{reason}; it is started again", file=sys.stderr, flush=True)
        await asyncio.sleep(delay_s)


async def _end_of(peer: "FirstPeer") -> str:
    """Why it is over with it, once it is."""
    try:
        await peer.watch()
    except OSError as error:
        return str(error)


def _port_of(address: str) -> int:
    """/ip4/192.0.2.7/tcp/8600/p2p/... -> 8600"""
    parts = address.split("/")
    return int(parts[parts.index("tcp") + 1])


def _welcome(signed: SignedSpec, invite: str, addresses: Sequence[str]) -> list[str]:
    """What the owner needs to know; the invite alone on a line, to be copied."""
    return [
        f"run {signed.spec.name}, id {signed.run_id}",
        f"reached at {', '.join(addresses)}",
        f"invite, good for {INVITE_DAYS} days; whoever has it can join:",
        "",
        invite,
        "",
        "next: p2pdiloco join INVITE, here in another terminal and on other machines",
        "Ctrl-C stops this peer; nodes that have joined go on without it",
    ]


def _read_owner(path: Path) -> Identity:
    if not path.exists():
        raise UserError(
            f"{path}: the owner's key is missing; restore it, or describe a new run with "
            "`p2pdiloco new` (a run can be started only with the key that owns it)"
        )
    return Identity.load_or_create(path)
