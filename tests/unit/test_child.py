"""What is said of how a child process ended."""

import asyncio
import signal
from types import SimpleNamespace
from typing import cast

import pytest

from p2pdiloco_daemon.children.child import Child
from p2pdiloco_daemon.learner.messages import Stop


@pytest.mark.parametrize(
    ("code", "was_killed_here", "words"),
    [
        (1, False, "exit code 1; no such text"),
        (-signal.SIGSEGV, False, "killed by SIGSEGV; no such text"),
        (-40, False, "killed by signal 40; no such text"),
        (-signal.SIGKILL, False, "killed by SIGKILL (out of memory?); no such text"),
        (-signal.SIGKILL, True, "killed by SIGKILL by its node, which it had left 10 s before; no"),
    ],
)
def test_a_death_is_told_with_its_last_words(code: int, was_killed_here: bool, words: str) -> None:
    child = Child[Stop](
        "the learner process",
        cast(asyncio.subprocess.Process, SimpleNamespace(returncode=code)),
        cast(asyncio.StreamReader, None),
        cast(asyncio.StreamWriter, None),
        stderr_tail=b"no such text\n",
        was_killed_here=was_killed_here,
    )
    assert child.last_words().startswith(f"the learner process ended: {words}")
