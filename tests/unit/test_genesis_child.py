"""What the child that makes the first weights says, and what is told of it."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon import genesis


def test_of_a_draft_that_is_wrong_the_sentence_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To stderr transformers shows how far it is, too."""

    def refuse(draft: RunSpec, directory: Path) -> None:
        sys.stderr.write("Loading weights: 100%")
        raise UserError(f"{draft.name} is too large")

    def run(command: list[str], *, input: bytes, **_options: object) -> object:
        monkeypatch.setattr(sys, "argv", [*command[:1], str(tmp_path)])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(input)))
        code = genesis._main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out.encode(), stderr=said.err.encode())

    monkeypatch.setattr(genesis, "make_genesis", refuse)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=r"\Akjv is too large\Z"):
        genesis._genesis_in_child(RunSpec(name="kjv"), tmp_path)
