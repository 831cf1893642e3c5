"""How long a learner waits for rollouts before it no longer counts on whoever dispatches them.

A synchronizer that opens no round is passed over once one is due; in an rl run none is due before
the learners have shares, so one that lives and dispatches nothing would hold all up for ever.
"""

from collections.abc import Hashable

PATIENCE_S = 60.0
"""Without a share, and without a question: a dispatcher asks the workers that it counts on twice a
second how they are, and everybody several times in this while."""


class Waiting:
    """Asked every second or so."""

    def __init__(self) -> None:
        self._seen: Hashable = None
        self._since = 0.0

    def is_over(self, version: int, dispatcher: Hashable, signs: Hashable, now: float) -> bool:
        """Whether to pass the dispatcher over. `signs` change with all that is heard of it; None if
        it need do nothing for us."""
        seen = (version, dispatcher, signs)
        if seen != self._seen or signs is None:
            self._seen, self._since = seen, now
        if now - self._since < PATIENCE_S:
            return False
        self._since = now
        return True
