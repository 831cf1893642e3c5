"""The command `p2pdiloco`: finds the subcommand, runs it, and turns errors into sentences."""

import argparse
import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from p2pdiloco.errors import P2PDilocoError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 something the person typed or wrote has to be mended."""
    # transformers imports torch's compiler, which makes this directory where there is none, and in
    # it, since nothing is compiled here, nothing
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.sep)
    _undo_what_was_inherited()
    try:
        return _run(argv)
    except UserError as error:
        print(f"p2pdiloco: {error}", file=sys.stderr)
        return 2
    except P2PDilocoError as error:
        print(f"p2pdiloco: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except OSError as error:
        if error.filename or error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        return _output_lost(error)


def _undo_what_was_inherited() -> None:
    """Of whoever started this: no stdin, stdout or stderr, for which the next file or socket would
    be taken, and children that nobody can wait for.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _run(argv: Sequence[str] | None) -> int:
    try:
        _require_a_place()
        arguments = build_parser().parse_args(argv)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except ExceptionGroup as group:  # of the tasks that ran beside the one that met the error
        _, others = group.split(P2PDilocoError)
        if others:
            raise
        raise _first(group) from group


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


def _output_lost(error: OSError) -> int:
    """Where stdout goes there is no more room, or nobody who reads."""
    # whatever Python still holds of the output would make it complain at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.ENOSPC:
        print("p2pdiloco: the output was not written: no space left on device", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    # imported late: it takes a second, in which a Ctrl-C should be as quiet as later
    from p2pdiloco_daemon.cli import bootstrap, demo, export, join, new, sample, simulate, status

    parser = argparse.ArgumentParser(
        prog="p2pdiloco",
        description="People with ordinary machines train one model together over ordinary links.",
        epilog="To take part in a run: p2pdiloco join INVITE. To see it work on this machine "
        "alone: p2pdiloco demo. `p2pdiloco COMMAND --help` explains each.",
    )
    parser.add_argument("--version", action="version", version=f"p2pdiloco {version('p2pdiloco')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, new, bootstrap, join, status, export, sample, simulate):
        command.add_parser(commands)
    return parser


def _require_a_place() -> None:
    """UserError if the current directory is gone: torch would end the process with a riddle."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError(
            "the directory in which this was started has been deleted; cd to one that exists"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
