"""What a node's directory remembers, and what a wrong one says."""

import errno
import os
import socket
from pathlib import Path

import pytest

from p2pdiloco.errors import PeerError, UserError
from p2pdiloco.signed_spec import SignedSpec, bytes_to_sign, canonical_bytes
from p2pdiloco.spec import GenesisSpec, RunSpec, SyncSpec, TensorLayout
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.invite import make_invite
from p2pdiloco_daemon.storage.place import Place, open_place

OWNER = Identity.generate()
NOW = 2_000_000_000.0
ADDRESS = f"/ip4/192.0.2.7/tcp/7441/p2p/{OWNER.peer_id}"
OTHER_ADDRESS = f"/ip4/192.0.2.8/tcp/7441/p2p/{OWNER.peer_id}"


def make_run(name: str = "first", owner: Identity = OWNER) -> SignedSpec:
    genesis = GenesisSpec(
        num_parameters=6,
        tensors=(TensorLayout(name="weight", shape=(2, 3)),),
        state_digests=("0" * 64,),
    )
    draft = RunSpec(name=name, sync=SyncSpec(num_fragments=1))
    spec_bytes = canonical_bytes(draft.with_genesis(genesis))
    return SignedSpec(spec_bytes, owner.public_key, owner.sign(bytes_to_sign(spec_bytes)))


RUN = make_run()


def invite(run: SignedSpec = RUN, address: str = ADDRESS) -> str:
    return make_invite(OWNER, run.run_id, (address,), int(NOW) + 3600)


def join(directory: Path, text: str | None) -> Place:
    return open_place(directory, text, lambda: NOW)


def test_an_invite_is_remembered(tmp_path: Path) -> None:
    place = join(tmp_path / "node", invite())
    assert (place.run_id, place.owner) == (RUN.run_id, OWNER.public_key)
    assert place.bootstraps == (ADDRESS,)
    assert join(tmp_path / "node", None) == place


def test_a_newer_invite_to_the_same_run_brings_new_addresses(tmp_path: Path) -> None:
    join(tmp_path, invite())
    join(tmp_path, invite(address=OTHER_ADDRESS))
    assert join(tmp_path, None).bootstraps == (OTHER_ADDRESS,)


def test_an_invite_to_another_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    place = join(tmp_path, invite())
    other = make_run("second")
    with pytest.raises(UserError, match=f"belongs to run {RUN.run_id}.*{other.run_id}.*--dir"):
        join(tmp_path, invite(other))
    assert join(tmp_path, None) == place


def test_without_an_invite_there_must_have_been_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has not joined a run yet; give an invite"):
        join(tmp_path, None)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run_id": 3}', "\xff"])
def test_a_damaged_join_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "join.json").write_bytes(content.encode("latin-1"))
    for text in (None, invite()):
        with pytest.raises(UserError, match=r"join\.json.* remove it and join again"):
            join(tmp_path, text)


def test_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        join(tmp_path / "file", invite())


def test_the_spec_is_kept_and_checked_again(tmp_path: Path) -> None:
    place = join(tmp_path, invite())
    assert place.spec() is None
    place.keep_spec(place.checked(RUN.pack()))
    assert place.spec() == RUN


def test_the_spec_of_another_run_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="another run"):
        join(tmp_path, invite()).checked(make_run("second").pack())


def test_a_spec_that_the_owner_in_the_invite_did_not_sign_is_not_taken(tmp_path: Path) -> None:
    theirs = make_run("first", Identity.generate())
    with pytest.raises(PeerError, match=r"signed by .*, the invite by"):
        join(tmp_path, invite(theirs)).checked(theirs.pack())


def test_a_damaged_spec_says_how_to_get_a_new_one(tmp_path: Path) -> None:
    place = join(tmp_path, invite())
    (tmp_path / "run.spec").write_bytes(RUN.pack()[:-5])
    with pytest.raises(UserError, match=r"run\.spec.*remove it, and it is fetched again"):
        place.spec()


def test_what_is_remembered_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a power cut leaves no empty file that asks for a person."""
    synced, fsync, replace = list[int](), os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    def require_synced(path: Path, target: Path) -> Path:
        assert path.stat().st_ino in synced, f"{target.name} is not synced"
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", require_synced)
    place = join(tmp_path, invite())
    place.keep_spec(RUN)
    assert place.listen_port(HOST)
    assert place.spec() == RUN


def test_a_full_disk_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match=r"join\.json: No space left.* choose another --dir"):
        join(tmp_path, invite())
    assert not list(tmp_path.iterdir())


HOST = "127.0.0.1"


def test_a_node_listens_where_it_did_before(tmp_path: Path) -> None:
    place = join(tmp_path, invite())
    port = place.listen_port(HOST)
    assert port and place.listen_port(HOST) == port


def test_a_port_that_somebody_else_has_is_left_to_them(tmp_path: Path) -> None:
    place = join(tmp_path, invite())
    port = place.listen_port(HOST)
    with socket.create_server((HOST, port)):
        other = place.listen_port(HOST)
        assert other not in (0, port)
    assert place.listen_port(HOST) == other


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"70000", b"-1", b'"8700"'])
def test_a_damaged_port_is_replaced(tmp_path: Path, content: bytes) -> None:
    place = join(tmp_path, invite())
    (tmp_path / "listen.json").write_bytes(content)
    port = place.listen_port(HOST)
    assert 0 < port < 70000 and place.listen_port(HOST) == port


def test_an_address_of_another_machine_has_no_port(tmp_path: Path) -> None:
    assert join(tmp_path, invite()).listen_port("192.0.2.1") == 0
