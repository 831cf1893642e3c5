"""A p2pd that does not come up: what it complains of is quoted, and a kill is called one."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap import p2pd
from p2pdiloco_bootstrap.p2pd import DaemonEnded, running_p2pd


def start(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """With a p2pd that does this instead."""

    async def spawn(
        binary: Path, arguments: Sequence[str], one_thread: bool
    ) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=pipe)

    async def main() -> None:
        async with running_p2pd(()):
            raise AssertionError("it never says that it is ready")

    monkeypatch.setattr(p2pd, "_spawn", spawn)
    asyncio.run(main())


def test_a_p2pd_that_is_killed_before_it_is_ready_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DaemonEnded, match=r"ended with code -9$"):
        start(monkeypatch, "import os; os.kill(os.getpid(), 9)")


def test_a_p2pd_that_complains_and_exits_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="did not start: bad address; check the addresses"):
        start(monkeypatch, "print('bad address'); raise SystemExit(2)")
