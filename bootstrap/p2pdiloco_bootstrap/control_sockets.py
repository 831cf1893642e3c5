"""Where the sockets lie through which a host and its p2pd talk, and that none stays behind."""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from p2pdiloco.errors import UserError

_SOCKET_PREFIX_BYTES_MAX = 75
"""macOS allows 103 bytes in the path of a unix socket, Linux 107; hivemind's name takes 26."""


@contextmanager
def socket_prefix(identity_path: Path) -> Iterator[str]:
    """What the paths of our control sockets begin with; whatever carries it is ours to remove.

    They lie beside the identity: a `kill -9` leaves them there, and the next start takes them away.
    Where that path is too long for a socket, a short one that follows from it does the same.
    """
    directory = identity_path.parent.resolve()
    with ExitStack() as stack:
        if len(str(directory / identity_path.stem).encode()) > _SOCKET_PREFIX_BYTES_MAX:
            directory = stack.enter_context(_short_directory(directory))
        prefix = f"{identity_path.stem}-"
        _remove_sockets(directory, prefix)
        stack.callback(_remove_sockets, directory, prefix)
        yield f"{directory}/{prefix}"


@contextmanager
def _short_directory(long: Path) -> Iterator[Path]:
    """A private directory in /tmp (macOS's own has a long name), the same for the same `long`."""
    name = blake2b(str(long).encode(), digest_size=6).hexdigest()
    directory = Path(f"/tmp/p2pdiloco-{os.getuid()}-{name}")
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{directory} is not this user's alone; have its owner remove it")
    try:
        yield directory
    finally:
        with suppress(OSError):  # another host of the same directory is still there
            directory.rmdir()


def _remove_sockets(directory: Path, prefix: str) -> None:
    for path in directory.glob(f"{prefix}*.sock"):
        path.unlink(missing_ok=True)


def remove_leftovers(identity_path: Path) -> None:
    """Takes away what a host of this identity left that was killed and will not start again."""
    with socket_prefix(identity_path):
        pass
