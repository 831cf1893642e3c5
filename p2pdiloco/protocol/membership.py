"""Who is here: a view from heartbeats, direct or passed on as gossip.

Liveness is judged per member from the intervals at which news of it came (mean plus four mean
deviations, as TCP times its retransmissions: RFC 6298), so a swarm of three and one of a thousand
need no setting.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.wire import SIGHTINGS_MAX, Heartbeat, Sighting

HEARTBEAT_S = 1.0
SUSPECT_MIN_S = 3.0
"""Three lost heartbeats in a row are bad luck on a home link, not a death."""
SUSPECT_MAX_S = 15.0
FORGET_S = 600.0
"""A member that was silent for so long is no longer probed; discovery may bring it back."""
MEMBERS_MAX = 4096
HEARSAY_MAX = MEMBERS_MAX // 2
"""A view so full takes in newcomers from themselves only: somebody may be making names up."""
FANOUT = 4
"""Members that a heartbeat goes to, beside the synchronizers: news reaches n members in about
log4(n) heartbeats.
"""
ALL_TO_ALL_MAX = 8
"""Up to so many members everybody tells everybody."""


@dataclass(slots=True)
class Member:
    """What is known of another node; `last_news` is -inf until it was heard of.

    Without further news it counts as alive until `alive_until`.
    """

    peer: PeerId
    since: float
    incarnation: int = 0
    sequence: int = 0
    last_news: float = float("-inf")
    interval_s: float = HEARTBEAT_S
    deviation_s: float = HEARTBEAT_S / 2
    alive_until: float = float("-inf")
    left: bool = False
    heartbeat: Heartbeat | None = None

    def said(self, heartbeat: Heartbeat, now: float) -> bool:
        """Takes in the member's own word, which overrides all gossip; False when it is old news."""
        last = self.heartbeat
        if last and (heartbeat.incarnation, heartbeat.sequence) <= (
            last.incarnation,
            last.sequence,
        ):
            return False
        self.left = self.left and last is not None and heartbeat.incarnation == last.incarnation
        self.heartbeat = heartbeat
        self._news(heartbeat.incarnation, heartbeat.sequence, now)
        return True

    def seen(self, sighting: Sighting, now: float) -> None:
        """Takes in what another member says of this one."""
        if (sighting.incarnation, sighting.sequence) > (self.incarnation, self.sequence):
            self.left = self.left and sighting.incarnation == self.incarnation
            self._news(sighting.incarnation, sighting.sequence, now)

    def _news(self, incarnation: int, sequence: int, now: float) -> None:
        if self.last_news > float("-inf"):
            gap = min(now - self.last_news, SUSPECT_MAX_S)
            self.deviation_s += 0.25 * (abs(gap - self.interval_s) - self.deviation_s)
            self.interval_s += 0.125 * (gap - self.interval_s)
        self.incarnation, self.sequence, self.last_news = incarnation, sequence, now
        self.alive_until = now + self.patience_s

    @property
    def patience_s(self) -> float:
        return min(max(self.interval_s + 4 * self.deviation_s, SUSPECT_MIN_S), SUSPECT_MAX_S)

    def alive(self, now: float) -> bool:
        return now <= self.alive_until and not self.left


@dataclass
class Membership:
    """The members other than this node. Iterates in the order of peer ids, so that nothing depends
    on hashing.
    """

    me: PeerId
    members: dict[PeerId, Member] = field(default_factory=dict)

    def meet(self, peer: PeerId, now: float) -> Member | None:
        """The member, made if need be; None for ourselves or when the view is full of living
        members.
        """
        member = self.members.get(peer)
        if member or peer == self.me:
            return member
        if len(self.members) >= MEMBERS_MAX and not self._forget_one(now):
            return None
        member = Member(peer, since=now)
        self.members = dict(sorted([*self.members.items(), (peer, member)]))
        return member

    def heard(self, peer: PeerId, heartbeat: Heartbeat, now: float) -> bool:
        """Takes in a direct heartbeat; False when it is old news."""
        member = self.meet(peer, now)
        if not member or not member.said(heartbeat, now):
            return False
        for sighting in heartbeat.sightings:
            known = sighting.peer in self.members or len(self.members) < HEARSAY_MAX
            seen = self.meet(sighting.peer, now) if known else None
            if seen:
                seen.seen(sighting, now)
        return True

    def left(self, peer: PeerId) -> None:
        if peer in self.members:
            self.members[peer].left = True

    def alive(self, now: float) -> list[Member]:
        return [m for m in self.members.values() if m.alive(now)]

    def is_alive(self, peer: PeerId, now: float) -> bool:
        return peer == self.me or (peer in self.members and self.members[peer].alive(now))

    def ready(self, now: float) -> list[tuple[Member, Heartbeat]]:
        """Living members that can contribute, with their newest heartbeat."""
        return [(m, m.heartbeat) for m in self.alive(now) if m.heartbeat and m.heartbeat.ready]

    def candidates(self) -> list[tuple[PeerId, float]]:
        """(peer, uplink MB/s) of all that could synchronize, alive or suspected: the order must not
        shift on a suspicion.
        """
        return [
            (peer, m.heartbeat.uplink_mb_s)
            for peer, m in self.members.items()
            if m.heartbeat and m.heartbeat.ready and not m.left
        ]

    def audience(self, now: float, rng: random.Random) -> list[PeerId]:
        """Whom to tell the next news: everybody in a small swarm, else some; and one that seems
        dead, to find out.
        """
        alive = [m.peer for m in self.alive(now)]
        silent = [
            peer
            for peer, m in self.members.items()
            if not m.alive(now) and not m.left and now - max(m.since, m.last_news) < FORGET_S
        ]
        chosen = alive if len(alive) <= ALL_TO_ALL_MAX else rng.sample(alive, FANOUT)
        return chosen + rng.sample(silent, min(2, len(silent)))

    def sightings(self, now: float, rng: random.Random) -> tuple[Sighting, ...]:
        """The freshest half and a random half of what is known, within the bound of a heartbeat."""
        alive = sorted(self.alive(now), key=lambda m: -m.last_news)
        if len(alive) > SIGHTINGS_MAX:
            half = SIGHTINGS_MAX // 2
            alive = alive[:half] + rng.sample(alive[half:], half)
        return tuple(Sighting(m.peer, m.incarnation, m.sequence) for m in alive)

    def forget(self, now: float) -> Iterable[PeerId]:
        """Drops who has been silent or gone for `FORGET_S`."""
        old = [p for p, m in self.members.items() if now - max(m.since, m.last_news) > FORGET_S]
        for peer in old:
            del self.members[peer]
        return old

    def _forget_one(self, now: float) -> bool:
        """Makes room: first the dead go, then those who never said anything themselves."""
        idle = [m for m in self.members.values() if not m.alive(now) or not m.heartbeat]
        if idle:
            oldest = min(idle, key=lambda m: (m.alive(now), max(m.since, m.last_news), m.peer))
            del self.members[oldest.peer]
        return bool(idle)
