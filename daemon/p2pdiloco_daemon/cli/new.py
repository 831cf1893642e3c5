"""`p2pdiloco new FILE`: a commented run spec, and the owner's key beside it."""

import argparse
import json
import re
import textwrap
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from p2pdiloco.errors import UserError
from p2pdiloco.spec import RlSpec, RunSpec
from p2pdiloco_bootstrap.identity import Identity

_NOT_BY_HAND = ("genesis", "protocol_version")
_LEFT_OUT: dict[str, BaseModel] = {"rl": RlSpec()}
"""Tables that a run need not have: in the draft as comments."""
_SECTION_COMMENTS = {
    "model": "Exactly one of preset, config, checkpoint.",
    "data": "Which text. Every node draws its own order from it; every 50th block is held out.",
    "inner": "AdamW, as every learner runs it between merges.",
    "outer": "Nesterov SGD, as every node applies it to each merged fragment.",
    "sync": "When and how the learners are merged.",
    "rl": "Reinforcement learning in place of text; needs sync.num_fragments = 1.",
    "limits": "Bounds that all nodes share.",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "new",
        help="write a run's description and its owner's key",
        description="Writes a commented run spec to FILE (TOML) and the key that will sign it "
        "beside it. Edit the spec, then start the run with `p2pdiloco bootstrap FILE`. "
        "Whoever holds the key owns the run: keep it, and give it to nobody.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="for example run.toml")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.file
    write_draft(path, RunSpec(name=_name_from(path)))
    print(f"{path}: the run's description; read and edit it")
    print(f"{owner_key_path(path)}: the owner's key; keep it safe and to yourself")
    print(f"next: p2pdiloco bootstrap {path}")
    return 0


def owner_key_path(spec_path: Path) -> Path:
    """run.toml -> run.key"""
    return spec_path.with_suffix(".key")


def write_draft(path: Path, draft: RunSpec) -> None:
    """Writes spec and key; refuses to overwrite either."""
    if not path.name:
        raise UserError(f"{path} is a directory; name a file, for example {path / 'run.toml'}")
    if path.suffix == ".key":
        raise UserError(f"{path}: .key is the ending of the owner's key; name the spec run.toml")
    try:
        for existing in (path, owner_key_path(path)):
            if existing.exists():
                raise UserError(
                    f"{existing} exists already and is not overwritten; name another file"
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draft_text(draft), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; name another file"
        ) from error
    Identity.load_or_create(owner_key_path(path))


def draft_text(draft: RunSpec) -> str:
    """TOML of the draft: every key with its meaning, keys without a value commented out."""
    head = [
        "# A p2pdiloco run, described once and signed by its owner. Defaults may be left out.",
        "# Nothing can be changed after `p2pdiloco bootstrap` has started the run.",
        "",
    ]
    names = [name for name in RunSpec.model_fields if name not in _NOT_BY_HAND]
    top = _table_lines(draft, [name for name in names if name not in _SECTION_COMMENTS])
    sections = [
        line
        for name in names
        if name in _SECTION_COMMENTS
        for line in ["", *_section_lines(name, getattr(draft, name))]
    ]
    return "\n".join([*head, *top, *sections]) + "\n"


def _section_lines(name: str, section: BaseModel | None) -> list[str]:
    lines = [
        f"[{name}]",
        f"# {_SECTION_COMMENTS[name]}",
        *_table_lines(section or _LEFT_OUT[name]),
    ]
    return lines if section else [f"# {line}" for line in lines]


def _table_lines(table: BaseModel, names: list[str] | None = None) -> list[str]:
    fields = type(table).model_fields
    return [
        line
        for name in names or list(fields)
        for line in _key_lines(name, getattr(table, name), fields[name])
    ]


def _key_lines(name: str, value: object, field: FieldInfo) -> list[str]:
    comment = textwrap.wrap(" ".join((field.description or "").split()), 96)
    lines = [f"# {line}" for line in comment]
    if value is None or value == ():
        return [*lines, f"# {name} ="]
    return [*lines, f"{name} = {_toml(value)}"]


def _toml(value: object) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's; its objects are not."""
    if not isinstance(value, dict):
        return json.dumps(value)
    items = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
    return f"{{ {', '.join(items)} }}"


def _name_from(path: Path) -> str:
    """A run name from the file's: lower case, dashes for everything else."""
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")
    return name[:63] or "run"
