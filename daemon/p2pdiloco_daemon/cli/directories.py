"""Where things lie on disk when the person names no directory, and which run was joined last."""

import json
import sys
from pathlib import Path

from p2pdiloco.errors import UserError

_LAST_NODE_FILE = "last-node.json"


def data_directory() -> Path:
    """The person's directory for everything p2pdiloco keeps."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "p2pdiloco"
    return home / ".local" / "share" / "p2pdiloco"


def node_directory(run_id: str) -> Path:
    """Of this person's node in a run; the run id, because names of runs are not unique."""
    return data_directory() / "nodes" / run_id[:16]


def bootstrap_directory(name: str) -> Path:
    """Of the first peer of this person's run of that name."""
    return data_directory() / "bootstrap" / name


def remember_last_node(directory: Path) -> None:
    """Notes `directory` for a `join` without an invite, and for `export` without --from."""
    note = data_directory() / _LAST_NODE_FILE
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"directory": str(directory.resolve())}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{note}: cannot be written: {error.strerror}; free or mend it") from error


def last_node() -> Path:
    """The directory of the run joined last; UserError where there is none."""
    note = data_directory() / _LAST_NODE_FILE
    try:
        directory = Path(json.loads(note.read_text(encoding="utf-8"))["directory"])
    except FileNotFoundError:
        raise UserError(
            "no run was joined on this machine yet; start with `p2pdiloco join INVITE`, "
            "or name a node's directory with an option (see --help)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{note}: not readable: {error}; remove it and join with an invite"
        ) from error
    if not directory.is_dir():
        raise UserError(f"the node's directory {directory} is gone; join again with an invite")
    return directory
