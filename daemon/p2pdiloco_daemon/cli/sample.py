"""`p2pdiloco sample DIR`: text from an exported checkpoint."""

import argparse
from pathlib import Path


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "sample",
        help="let an exported model write text",
        description="Prints the PROMPT and how the model in DIR goes on.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="as `export` wrote it")
    parser.add_argument("--prompt", default="", help="text to go on from (default: none)")
    parser.add_argument(
        "--tokens", type=_token_count, default=300, help="how many to write (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another one gives another text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # imported late: torch takes seconds
    from transformers.utils import logging

    from p2pdiloco_daemon.export import sample_checkpoint

    logging.disable_progress_bar()

    text = sample_checkpoint(
        arguments.directory, arguments.prompt, arguments.tokens, arguments.seed
    )
    print(arguments.prompt + text)
    return 0


def _token_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 100000 tokens, got {text!r}")
    return int(text)
