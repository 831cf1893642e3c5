"""The run spec as a person writes it, in TOML, and what is wrong with it in words."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from p2pdiloco.errors import UserError
from p2pdiloco.protocol.wire import PROTOCOL_VERSION
from p2pdiloco.spec import RunSpec


def read_spec_file(path: Path) -> RunSpec:
    """Reads a draft from TOML; a UserError names file, key, what was expected and what was got."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; `p2pdiloco new {path}` writes a commented one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str) -> RunSpec:
    """Parses a draft in TOML; `source` names it in errors."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source}: not valid TOML: {error}") from error
    if "genesis" in values:
        raise UserError(
            f"{source}: genesis: written by `p2pdiloco bootstrap`, not by hand; remove the table"
        )
    version = values.get("protocol_version", PROTOCOL_VERSION)
    if isinstance(version, int) and (problem := protocol_problem(version)):
        raise UserError(f"{source}: {problem}")
    try:
        # By way of JSON, because strict mode takes a list for a tuple only from there.
        return RunSpec.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise UserError(describe_errors(error, source)) from error


def protocol_problem(version: int) -> str | None:
    """Why a spec of this protocol version cannot be run here, or None."""
    if version == PROTOCOL_VERSION:
        return None
    remedy = "update p2pdiloco on this machine" if version > PROTOCOL_VERSION else "ask its owner"
    return (
        f"protocol_version: the run needs version {version}, this p2pdiloco speaks "
        f"version {PROTOCOL_VERSION}; {remedy}"
    )


def differences(
    one: RunSpec, other: RunSpec, names: tuple[str, str] = ("ours", "theirs")
) -> list[str]:
    """How two specs differ, one sentence per key; empty if they are the same."""
    mine, yours = flatten(one.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
    return [
        f"{key}: {names[0]} {_shown(mine.get(key))}, {names[1]} {_shown(yours.get(key))}"
        for key in sorted(mine.keys() | yours.keys())
        if mine.get(key) != yours.get(key)
    ]


def describe_errors(error: ValidationError, source: str) -> str:
    """One line per mistake: where, what was expected, what was got, the nearest known key."""
    return "\n".join(f"{source}: {_describe_error(dict(item))}" for item in error.errors())


def _describe_error(item: Mapping[str, Any]) -> str:
    location = item["loc"]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_nearest_keys(location)}"
    if item["type"] == "missing":
        return f"{key}: missing; add it"
    expected = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{key}: {expected}" if key else expected
    expected = expected.removeprefix("Input should be ").removeprefix("String should ")
    return f"{key}: expected {expected}, got {_shown(item['input'])}"


def _nearest_keys(location: tuple[str | int, ...]) -> str:
    """Advice for an unknown key: a near one in its table, or its right table, or all keys."""
    table, name = location[:-1], str(location[-1])
    known = sorted(_section_at(table).model_fields)
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    elsewhere = [path for path in _all_keys() if path.split(".")[-1] == name]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known here: {', '.join(known)}"


def _section_at(table: tuple[str | int, ...]) -> type[BaseModel]:
    section: type[BaseModel] = RunSpec
    for part in table:
        section = _section_type(section, str(part)) or section
    return section


def _section_type(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    """None also for a place in a list of tables."""
    field = section.model_fields.get(name)
    annotation = field.annotation if field else None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys() -> list[str]:
    keys = []
    for name in RunSpec.model_fields:
        section = _section_type(RunSpec, name)
        keys += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return keys


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: `table.key` -> value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
