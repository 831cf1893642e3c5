"""`p2pdiloco export DIR`: the run's model as an ordinary Hugging Face checkpoint."""

import argparse
from pathlib import Path

from p2pdiloco.errors import UserError
from p2pdiloco_daemon.cli.directories import last_node
from p2pdiloco_daemon.storage.files import require_free_directory


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write the run's model as a Hugging Face checkpoint",
        description="Writes the newest merged model that a node of this machine holds to DIR: "
        "weights (safetensors), config and tokenizer, as AutoModelForCausalLM.from_pretrained(DIR) "
        "loads them. The node may be running.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="must not exist, or be empty")
    parser.add_argument(
        "--from",
        dest="node",
        type=Path,
        metavar="NODE_DIR",
        help="directory of the node (default: of the run joined last)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    node: Path = arguments.node or last_node()
    if not node.is_dir():
        raise UserError(f"there is no node in {node}; name its directory with --from")
    require_free_directory(arguments.directory)
    # imported late: torch takes seconds, and a wrong argument should be told at once
    from transformers.utils import logging

    from p2pdiloco_daemon.export import export_checkpoint

    logging.disable_progress_bar()

    export_checkpoint(node, arguments.directory)
    print(f"{arguments.directory}: written from {node}")
    print(f"try it: p2pdiloco sample {arguments.directory} --prompt 'In the beginning'")
    return 0
