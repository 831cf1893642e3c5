"""Training and generating are background work: whatever else a machine does goes first.

So a volunteer does not notice them, and the daemon, whose word the others wait for, never waits for
its own learner.
"""

import os
from contextlib import suppress
from pathlib import Path

NICENESS = 10
"""A tenth of a core's time where something else wants all of it."""

_AUTOGROUP = Path("/proc/self/autogroup")
"""Where Linux shares its cores out among sessions, and each child has a session of its own, this
counts and niceness does not."""


def work_in_background() -> None:
    """This process and all that it starts, from now on."""
    os.nice(NICENESS)
    with suppress(OSError):
        _AUTOGROUP.write_text(str(NICENESS))
