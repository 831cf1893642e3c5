"""The command `p2pdiloco`: finds the subcommand, runs it, and turns errors into sentences."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from importlib.metadata import version

from p2pdiloco.errors import P2PDilocoError, UserError
from p2pdiloco_daemon.cli import bootstrap, demo, export, join, new, sample, simulate, status

_COMMANDS = (demo, new, bootstrap, join, status, export, sample, simulate)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 something the person typed or wrote has to be mended."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"p2pdiloco: {error}", file=sys.stderr)
        return 2
    except P2PDilocoError as error:
        print(f"p2pdiloco: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p2pdiloco",
        description="People with ordinary machines train one model together over ordinary links.",
        epilog="To take part in a run: p2pdiloco join INVITE. To see it work on this machine "
        "alone: p2pdiloco demo. `p2pdiloco COMMAND --help` explains each.",
    )
    parser.add_argument("--version", action="version", version=f"p2pdiloco {version('p2pdiloco')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
