"""`p2pdiloco new`: the draft it writes says everything and reads back as written."""

import re
import stat
from pathlib import Path

import pytest
from pydantic import JsonValue

from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec, OuterSpec, RlSpec, RunSpec, SyncSpec
from p2pdiloco.spec_file import parse_spec, read_spec_file
from p2pdiloco_daemon.cli.main import main
from p2pdiloco_daemon.cli.new import draft_text


def test_it_writes_spec_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "My Run.toml"
    assert main(["new", str(path)]) == 0
    assert read_spec_file(path) == RunSpec(name="my-run")
    assert stat.S_IMODE((tmp_path / "My Run.key").stat().st_mode) == 0o600
    assert "next: p2pdiloco bootstrap" in capsys.readouterr().out


@pytest.mark.parametrize("existing", ["run.toml", "run.key"])
def test_it_overwrites_nothing(
    tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / existing).write_text("precious")
    assert main(["new", str(tmp_path / "run.toml")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"
    assert f"{existing} exists already" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new", str(tmp_path / "file" / "run.toml")]) == 2
    assert "run.toml: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", ".", "/", "a" * 300, "a" * 300 + ".toml"], ids=len)
def test_what_is_no_name_of_a_file_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 2
    assert re.search("name a file|name another file", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_the_draft_reads_back() -> None:
    draft = RunSpec(
        name="a",
        seed=7,
        model=ModelSpec(checkpoint='a "quoted"\\name'),
        data=DataSpec(source="files", paths=("a.txt", "ü.txt")),
        inner=InnerSpec(schedule="cosine", betas=(0.8, 0.99)),
        outer=OuterSpec(learning_rate=1.0, momentum=0.0),
        sync=SyncSpec(wire="int4"),
    )
    assert parse_spec(draft_text(draft), "draft") == draft


def test_a_model_configuration_reads_back() -> None:
    rope: JsonValue = {"theta": 1e4, "kinds": ["a", "b"]}
    config: dict[str, JsonValue] = {"model_type": "llama", "rope": rope, "tied": True}
    draft = RunSpec(name="a", model=ModelSpec(config=config))
    assert parse_spec(draft_text(draft), "draft") == draft


def test_an_rl_table_reads_back() -> None:
    draft = RunSpec(name="a", sync=SyncSpec(num_fragments=1), rl=RlSpec(environment="sums"))
    assert parse_spec(draft_text(draft), "draft") == draft


def test_a_table_that_a_run_need_not_have_is_there_as_comments() -> None:
    text = draft_text(RunSpec(name="a", sync=SyncSpec(num_fragments=1)))
    rl = text[text.index("# [rl]") : text.index("[limits]")]
    assert all(line.startswith("# ") for line in rl.strip().splitlines())
    uncommented = text.replace(rl, rl.replace("\n# ", "\n").removeprefix("# "))
    assert parse_spec(uncommented, "draft").rl == RlSpec()


def test_every_key_of_the_spec_is_in_the_draft() -> None:
    lines = [line.removeprefix("# ") for line in draft_text(RunSpec(name="a")).splitlines()]
    keys = {line.split(" =")[0] for line in lines}
    for section in (ModelSpec, DataSpec, InnerSpec, OuterSpec, SyncSpec, RlSpec):
        assert set(section.model_fields) <= keys
