"""An export for which there is no room."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from safetensors import SafetensorError

from p2pdiloco.errors import UserError
from p2pdiloco.spec import DataSpec, RunSpec
from p2pdiloco_daemon import export


def test_a_full_disk_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written by safetensors, whose errors are no OSError."""

    class Model:
        def named_parameters(self) -> list[object]:
            return []

        def save_pretrained(self, directory: Path) -> None:
            (directory / "config.json").write_text("{}")
            raise SafetensorError("I/O error: No space left on device")

    spec = cast(RunSpec, SimpleNamespace(architecture=None, seed=0, data=DataSpec()))
    monkeypatch.setattr(export, "build_model", lambda *_: Model())
    with pytest.raises(UserError, match="cannot be written: I/O error: No space left"):
        export.write_checkpoint(spec, (), (), tmp_path / "model")
    assert not list(tmp_path.iterdir())
