"""What a forked node or first peer runs, instead of `python -m p2pdiloco_daemon.cli.main`.

    forked_command ORDER_FD OUTPUT_FD SUPERVISOR_FD

The order is what `written_order` has written. Not here: who forks (`children.forkserver`).
"""

import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from setproctitle import setproctitle

from p2pdiloco_daemon.children.bound import unbind
from p2pdiloco_daemon.cli import main as command

_CLONE_NEWNET = 0x40000000


def written_order(
    arguments: Sequence[str], network: Path | None, environment: Mapping[str, str]
) -> IO[str]:
    """A file with all that the process has to know; `network` is a namespace to enter."""
    told = {
        "arguments": arguments,
        "environment": dict(environment),
        "network": str(network) if network else None,
    }
    file = open(os.memfd_create("p2pdiloco order"), "w+")  # noqa: SIM115  # the caller closes it
    json.dump(told, file)
    file.seek(0)
    return file


def enter_network(namespace: Path) -> None:
    """Moves the calling thread there; OSError (`os.setns` comes with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(namespace))


def main() -> int:
    order_fd, output_fd, supervisor_fd = map(int, sys.argv[1:])
    unbind()  # it leaves in order when the supervisor's pipe closes
    with open(order_fd) as file:
        order = json.load(file)
    os.dup2(output_fd, 1)
    os.close(output_fd)
    sys.stdout = open(1, "w", buffering=1)  # noqa: SIM115  # until the process ends
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["network"]:
        enter_network(Path(order["network"]))
    arguments = [*order["arguments"], "--supervisor-fd", str(supervisor_fd)]
    setproctitle(" ".join([sys.executable, "-m", command.__name__, *arguments]))
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
