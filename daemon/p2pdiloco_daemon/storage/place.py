"""What a node's directory remembers between lives, and what a new one is told: key, run,
bootstraps.

    DIR/identity.key    the node's key
    DIR/join.json       run id, owner and bootstrap addresses of the newest invite
    DIR/listen.json     the port for other nodes, which have its address from the last life
    DIR/run.spec        the signed spec, once it was fetched
"""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco.errors import PeerError, StoreError, UserError
from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco_bootstrap.identity import verify_with_key
from p2pdiloco_bootstrap.invite import parse_invite
from p2pdiloco_daemon.storage.files import disk_access, write_whole

SPEC_FILE = "run.spec"
JOIN_FILE = "join.json"
LISTEN_FILE = "listen.json"
IDENTITY_FILE = "identity.key"


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of one node of one run."""

    directory: Path
    run_id: str
    owner: str
    bootstraps: tuple[str, ...]

    @property
    def identity_path(self) -> Path:
        return self.directory / IDENTITY_FILE

    def spec(self) -> SignedSpec | None:
        """The spec that was kept, checked again; None if there is none yet."""
        path = self.directory / SPEC_FILE
        if not path.exists():
            return None
        try:
            return self.checked(path.read_bytes())
        except (OSError, PeerError) as error:
            raise UserError(
                f"{path}: {error}; if the file is damaged, remove it, and it is fetched again"
            ) from error

    def checked(self, packed: bytes) -> SignedSpec:
        """PeerError unless this is the spec of our run, signed by the owner in the invite."""
        signed = SignedSpec.unpack(packed, verify_with_key, self.run_id)
        if signed.owner != self.owner:
            raise PeerError(f"the spec is signed by {signed.owner}, the invite by {self.owner}")
        return signed

    def keep_spec(self, signed: SignedSpec) -> None:
        _write(self.directory / SPEC_FILE, signed.pack())

    def listen_port(self, host: str) -> int:
        """The port of the last life, if `host` has it free, else another free one, which is kept.

        0 if there is none: whoever listens will say why.
        """
        last = self._last_port()
        port = _free_port(host, last) or _free_port(host, 0) or 0
        if port != last:
            _write(self.directory / LISTEN_FILE, json.dumps(port).encode())
        return port

    def _last_port(self) -> int:
        with suppress(OSError, ValueError, RecursionError):
            match json.loads((self.directory / LISTEN_FILE).read_bytes()):
                case int(port) if 0 < port < 1 << 16:
                    return port
        return 0


def _free_port(host: str, port: int) -> int | None:
    """`port`, or any free one for 0; None if it cannot be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return None
        bound: int = probe.getsockname()[1]
        return bound


def open_place(directory: Path, invite: str | None, now: Callable[[], float] = time.time) -> Place:
    """The place that the invite, or an earlier life, describes. UserError if they contradict."""
    path = directory / JOIN_FILE
    before = _read(path)
    if invite is None:
        if before is None:
            raise UserError(f"{directory} has not joined a run yet; give an invite")
        return before
    told = parse_invite(invite, now())
    if before and before.run_id != told.run_id:
        raise UserError(
            f"{directory} belongs to run {before.run_id}, the invite is to run {told.run_id}; "
            "choose another directory with --dir"
        )
    place = Place(directory, told.run_id, told.owner, told.bootstraps)
    fields = {"run_id": place.run_id, "owner": place.owner, "bootstraps": list(place.bootstraps)}
    _write(path, json.dumps(fields, indent=1).encode())
    return place


def _read(path: Path) -> Place | None:
    try:
        match json.loads(path.read_bytes()):
            case {"run_id": str(run_id), "owner": str(owner), "bootstraps": [*bootstraps]}:
                return Place(path.parent, run_id, owner, tuple(map(str, bootstraps)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it and join again") from error
    raise UserError(f"{path} is damaged; remove it and join again with the invite")


def _write(path: Path, content: bytes) -> None:
    try:
        with disk_access(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, ())
    except StoreError as error:
        raise UserError(f"{error} Or choose another --dir.") from error
