from pathlib import Path

from p2pdiloco_bootstrap.control_sockets import remove_leftovers, socket_prefix


def test_what_a_killed_host_left_is_taken_away(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 25)
    directory.mkdir()
    identity = directory / "identity.key"
    with socket_prefix(identity) as prefix:
        short = Path(prefix).parent
    assert not short.exists()
    short.mkdir(mode=0o700)  # a host that is killed leaves its directory and a socket in it
    Path(f"{prefix}p2pclient-x.sock").touch()
    remove_leftovers(identity)
    assert not short.exists()
