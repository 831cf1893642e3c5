"""Peers that are left alone for a while after they were of no use, longer each time."""

from p2pdiloco.protocol.naming import PeerId

PAUSES_MAX = 1024
"""Peers remembered; of more, the one whose pause ends first is forgotten."""
FORGIVEN_AFTER_S = 3600.0
"""A peer that was left in peace for so long after its pause begins anew."""


class Pauses:
    """The first pause lasts `first_s`, each further one twice as long, at most `longest_s`."""

    def __init__(self, first_s: float, longest_s: float):
        self.first_s = first_s
        self.longest_s = longest_s
        self._pauses: dict[PeerId, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._pauses)

    def begin(self, peer: PeerId, now: float) -> float:
        """Returns how long. A pause under way is not made longer."""
        count, until = self._pauses.pop(peer, (0, now))
        if until > now:
            self._pauses[peer] = (count, until)
            return until - now
        count = 1 if now > until + FORGIVEN_AFTER_S else count + 1
        pause_s = backoff_s(self.first_s, count, self.longest_s)
        if len(self._pauses) >= PAUSES_MAX:
            del self._pauses[min(self._pauses, key=lambda p: (self._pauses[p][1], p))]
        self._pauses[peer] = (count, now + pause_s)
        return pause_s

    def over(self, peer: PeerId, now: float) -> bool:
        return self._pauses.get(peer, (0, now))[1] <= now

    def count(self, peer: PeerId) -> int:
        """Pauses in a row."""
        return self._pauses.get(peer, (0, 0.0))[0]

    def forgive(self, peer: PeerId) -> None:
        self._pauses.pop(peer, None)


def backoff_s(first_s: float, failures: int, longest_s: float) -> float:
    """The wait after so many failures in a row (at least one)."""
    return min(first_s * 2.0 ** min(failures - 1, 32), longest_s)
