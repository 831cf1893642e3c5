"""What the commands say about arguments that cannot be used, and that every one explains itself."""

import asyncio
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco.simulation.goodput_mixed import Mixed
from p2pdiloco_daemon import goodput_plot
from p2pdiloco_daemon.cli import demo, directories, simulate
from p2pdiloco_daemon.cli import main as main_module
from p2pdiloco_daemon.cli.main import main
from p2pdiloco_daemon.cli.ports import host_and_port, require_free
from p2pdiloco_daemon.demo.display import Display
from p2pdiloco_daemon.demo.supervisor import DemoOptions
from p2pdiloco_daemon.rollouts import backends
from p2pdiloco_daemon.status.view import (
    JsonObject,
    Learner,
    LearnerState,
    NodeState,
    Run,
    Status,
    TokenLedger,
)

COMMANDS = ("demo", "new", "bootstrap", "join", "status", "export", "sample", "simulate")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing that a test does reaches the person's own directory."""
    monkeypatch.setattr(directories, "data_directory", lambda: tmp_path / "data")
    return tmp_path / "data"


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence on stderr of a command that exits with 2."""
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert "Traceback" not in captured.err
    return captured.err.splitlines()[-1]


@contextmanager
def occupied_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """A web server on loopback that gives the same answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert len(capsys.readouterr().out) > 200


def test_without_a_command_the_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys).endswith("the following arguments are required: COMMAND")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["demo", "--nodes", "0"], "expected 1 to 16 nodes, got '0'"),
        (["demo", "--nodes", "1.5"], "expected 1 to 16 nodes, got '1.5'"),
        (["demo", "--minutes", "-1"], "expected a number of minutes above 0, got '-1'"),
        (["demo", "--minutes", "nan"], "expected a number of minutes above 0, got 'nan'"),
        (["demo", "--port", "70000"], "expected a port from 0 to 65535, got 70000"),
        (["join", "x", "--threads", "0"], "expected a number of threads from 1, got '0'"),
        (["join", "x", "--listen", "4001"], "expected HOST:PORT, for example 0.0.0.0:4001"),
        (["sample", "x", "--tokens", "0"], "expected 1 to 100000 tokens, got '0'"),
    ],
)
def test_a_wrong_argument_is_named(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(capsys, *argv)


def test_join_needs_an_invite_the_first_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run was joined on this machine yet" in complaint(capsys, "join")


def test_join_refuses_a_garbled_invite(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert "damaged on the way" in complaint(capsys, "join", "p2pdiloco:AAAA")
    assert "an invite starts with 'p2pdiloco:'" in complaint(capsys, "join", "hello")
    assert not home.exists()


def test_a_forgotten_node_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    directories.remember_last_node(gone)
    gone.rmdir()
    assert f"the node's directory {gone} is gone" in complaint(capsys, "join")


def test_join_names_an_occupied_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with occupied_port() as port:
        words = complaint(capsys, "join", "--dir", str(tmp_path), "--port", str(port))
    assert f"port {port} on 127.0.0.1 cannot be used" in words
    assert words.endswith("choose another port with --port")


def test_demo_names_an_occupied_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with occupied_port() as port:
        words = complaint(capsys, "demo", "--dir", str(tmp_path / "d"), "--port", str(port))
    assert f"port {port} on 127.0.0.1 cannot be used" in words
    assert not (tmp_path / "d").exists()


def test_demo_says_when_its_ports_come_to_an_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = complaint(capsys, "demo", "--dir", str(tmp_path / "d"), "--port", "65534")
    assert "there is no port 65536" in words
    assert words.endswith("choose a lower one with --port")


def test_demo_leaves_a_directory_of_others_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    words = complaint(capsys, "demo", "--dir", str(tmp_path), "--port", "0")
    assert "is not empty and holds no demo" in words


def test_a_demo_that_is_broken_off_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_off(options: DemoOptions, display: Display) -> JsonObject:
        assert options.spec_file.exists()
        raise asyncio.CancelledError

    monkeypatch.setattr(demo, "data_directory", lambda: home)
    monkeypatch.setattr(demo, "run_demo", broken_off)
    monkeypatch.setattr(demo, "running_forkserver", lambda modules: nullcontext())
    assert main(["demo"]) == 130
    assert not list((home / "demo").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "p2pdiloco_daemon.cli.main", "new", str(tmp_path / "run.toml")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "p2pdiloco: the output was not written: no space left on device\n",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs a shell that closes and ignores")
def test_a_command_does_not_care_what_its_parent_has_closed_or_ignores(tmp_path: Path) -> None:
    program = (
        "import os, sys; from p2pdiloco_daemon.cli import main as command\n"
        "def parser():\n"
        "    child = os.spawnlp(os.P_WAIT, 'true', 'true')\n"
        f"    told = open({str(tmp_path / 'told')!r}, 'w')\n"
        "    print(child, told.fileno() > 2, file=told)\n"
        "    sys.exit(0)\n"
        "command.build_parser = parser\n"
        "command.main(['join'])\n"
    )
    script = f"trap '' CHLD; exec {sys.executable} -c \"$0\" <&- >&- 2>&-"
    subprocess.run(["sh", "-c", script, program], check=True)
    assert (tmp_path / "told").read_text() == "0 True\n"


def test_bootstrap_needs_the_owners_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["new", str(tmp_path / "run.toml")])
    capsys.readouterr()
    (tmp_path / "run.key").unlink()
    words = complaint(capsys, "bootstrap", str(tmp_path / "run.toml"))
    assert "run.key: the owner's key is missing" in words


def test_bootstrap_names_a_mistake_in_the_spec(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text('name = "a"\n[sync]\ninner_steps = -5\n')
    words = complaint(capsys, "bootstrap", str(tmp_path / "run.toml"))
    assert words.endswith("sync.inner_steps: expected greater than or equal to 1, got -5")


def test_status_says_when_there_is_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    with occupied_port() as port:
        pass
    assert f"no node answers on port {port}" in complaint(capsys, "status", "--port", str(port))


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"", "it answers with HTTP 404"),
        (200, b"<html>", "something else than JSON"),
        (200, b'{"other": 1}', "its answer is not a node's status"),
    ],
)
def test_status_says_when_another_program_answers(
    status: int, body: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as port:
        assert words in complaint(capsys, "status", "--port", str(port))


def test_status_says_when_what_answers_speaks_no_http(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def greet(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet, args=(server,))
        thread.start()
        told = complaint(capsys, "status", "--port", str(server.getsockname()[1]))
        thread.join()
    assert "something else than HTTP" in told


def test_a_node_may_listen_on_ipv6() -> None:
    assert host_and_port("0.0.0.0:4001") == ("0.0.0.0", 4001)
    assert host_and_port("[::1]:4001") == ("::1", 4001)
    told = r"port 0 on 2001:db8::7 cannot be used \((Cannot assign|Address family not supported by)"
    with pytest.raises(UserError, match=told):
        require_free("2001:db8::7", 0, "--listen")


def test_status_prints_what_the_node_tells(capsys: pytest.CaptureFixture[str]) -> None:
    told = Status(
        protocol_version=1,
        app_version="0.1.0",
        peer_id="peer",
        node_name="lab",
        run=Run(id="ab" * 16, name="kjv"),
        state=NodeState.TRAINING,
        sentence="Training, 2 other nodes.",
        uptime_s=5.0,
        tokens=TokenLedger(processed=9, merged=4, pending=2, rejected={"late": 2}, lost={"x": 1}),
    )
    with answering(200, json.dumps(told.to_json()).encode()) as port:
        assert main(["status", "--port", str(port)]) == 0
        text = capsys.readouterr().out
        assert main(["status", "--port", str(port), "--json"]) == 0
    assert text.startswith("Training, 2 other nodes.\nrun           kjv (")
    assert "9 processed = 4 merged + 2 pending + 2 rejected + 1 lost" in text
    assert json.loads(capsys.readouterr().out) == told.to_json()


def test_status_says_what_keeps_the_learner_from_starting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = Status(
        protocol_version=1,
        app_version="0.1.0",
        peer_id="peer",
        node_name="lab",
        run=Run(id="ab" * 16, name="kjv"),
        state=NodeState.ISOLATED,
        sentence="The learner process ended and is started again.",
        uptime_s=5.0,
        learner=Learner(state=LearnerState.RESTARTING, last_error="no text here"),
    )
    with answering(200, json.dumps(told.to_json()).encode()) as port:
        assert main(["status", "--port", str(port)]) == 0
    assert "\nproblem       no text here\n" in capsys.readouterr().out


# -------------------------------------------------------------------- simulate


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chips", "0"], "chips: expected a whole number from 1 to 1000000000, got 0"),
        (["--chips", "many"], "argument --chips: invalid int value: 'many'"),
        (["--chips", "8", "--learners", "9"], "9 learners cannot share 8 chips"),
        (["--seeds", "-1"], "seeds: expected a whole number from 1 to 1000, got -1"),
        (["--interruption-years", "-1"], "expected a number of years above 0, got '-1'"),
        (["--scale-down-s", "-3"], "scale_down_s: expected a number from 0 to 86400, got -3"),
        (["--interruption-years", "1e-3"], "2400000 chips would fail every 0.013 s"),
        (["--volunteers", "1"], "--volunteers: expected a whole number from 2 to 4000, got 1"),
        (["--volunteers", "9", "--hours", "0"], "--hours: expected a number above 0"),
        (["--volunteers", "2", "--hours", "0.01"], "none of 2 volunteers happened to be online"),
        (["--volunteers", "9", "--plot", "a.svg"], "--plot draws the table of chips"),
        (["--plot", "a.pdf"], "--plot: expected a file that ends in .png or .svg, got a.pdf"),
        (["--json", "no/such/place.json"], "the directory no/such does not exist"),
        (["--json", "/"], "--json: / is a directory; name a file"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(capsys, "simulate", *argv)


def test_a_backend_that_is_not_installed_is_refused_before_anything_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    words = complaint(capsys, "join", "--rollout-backend", "vllm", "--dir", str(tmp_path / "node"))
    assert words.endswith("not installed: python -m pip install 'p2pdiloco[vllm]'")
    assert not (tmp_path / "node").exists()


def test_simulate_says_what_a_picture_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(goodput_plot, "find_spec", lambda name: None)
    words = complaint(capsys, "simulate", "--plot", str(tmp_path / "a.png"))
    assert words.endswith("not installed: python -m pip install 'p2pdiloco[benchmarks]'")


def test_simulate_prints_and_writes_a_small_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "run_mixed", lambda seed: (Mixed("K = 1", 1.0, 1.0, 1.0),))
    argv = ["simulate", "--chips", "2400000", "--learners", "2", "--seeds", "1"]
    assert main([*argv, "--json", str(tmp_path / "a.json")]) == 0
    text = capsys.readouterr().out
    assert "data parallel, rigid" in text
    assert "decoupled, M=2" in text
    assert "No learner ever waited" in text
    told = json.loads((tmp_path / "a.json").read_text())
    assert [cell["row"] for cell in told["cells"]] == ["rigid", "elastic", "M=2"]
    assert told["cells"][2]["merging"]["num_merges"] > 0
    assert told["mixed"][0]["policy"] == "K = 1"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_deleted_current_directory_is_told(
    command: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert complaint(capsys, command).endswith("has been deleted; cd to one that exists")


def test_ctrl_c_while_the_commands_are_imported_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "build_parser", interrupted)
    assert main(["--help"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_mistake_that_one_of_several_tasks_meets_is_a_sentence_and_a_bug_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [ExceptionGroup("inner", [UserError("mend it")])]

    def fail() -> None:
        raise ExceptionGroup("outer", errors)

    monkeypatch.setattr(main_module, "build_parser", fail)
    assert main(["join"]) == 2
    assert capsys.readouterr() == ("", "p2pdiloco: mend it\n")
    errors.append(RuntimeError("a bug"))
    with pytest.raises(ExceptionGroup, match="outer"):
        main(["join"])


def test_export_tells_at_once_what_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place, node = tmp_path / "place", tmp_path / "node"
    words = complaint(capsys, "export", str(place), "--from", str(node))
    assert words.endswith(f"there is no node in {node}; name its directory with --from")
    node.mkdir()
    words = complaint(capsys, "export", ".", "--from", str(node))
    assert words.endswith("name a new directory, for example model")
    place.write_text("precious")
    words = complaint(capsys, "export", str(place), "--from", str(node))
    assert "exists and is not empty" in words
