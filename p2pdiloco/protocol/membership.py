"""Who is here: a view from heartbeats, direct or passed on as gossip.

Liveness is judged per member from the intervals at which news of it came (mean plus four mean
deviations, as TCP times its retransmissions: RFC 6298), and heartbeats slow down as the swarm
grows, so a swarm of three and one of a thousand need no setting. What is asked at every event costs
the same in both: who was heard of lately stands at the end of a dictionary, and of many members a
sample is looked at.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import sqrt

from p2pdiloco.protocol.election import weight
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.wire import SIGHTINGS_MAX, Heartbeat, Sighting

HEARTBEAT_S = 1.0
SUSPECT_MIN_S = 3.0
"""Three lost heartbeats in a row are bad luck on a home link, not a death."""
SUSPECT_MAX_S = 15.0
UNHURRIED_MEMBERS = 16
"""From so many members on, heartbeats and suspicion slow down with the square root of their number:
of 1,000, each speaks every 8 s. So both halves of the price of a growing swarm are shared out: news
of a death takes longer, and a home link carries more names. Merges take minutes there, and nobody
but a synchronizer is waited for.
"""
SIGHTINGS_MIN = 16
"""Up to so many members a heartbeat names all; of more a quarter, within the bound: what `FANOUT`
others send in one period then names everybody once, in a swarm of 256 and less.
"""
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
LOOK_MAX = 32
"""Members that are looked at for those to tell, drawn anew each time."""
VOICES_MAX = 64
"""Members whose own word is asked for the pace of the swarm: the median of so many is within a
tenth of the ranks of the median of all, nine times in ten.
"""
REPORTERS_MAX = 32
"""Members that report to a synchronizer in one period; a home link takes no more beside a merge."""


@dataclass(slots=True)
class Member:
    """What is known of another node; `last_news` is -inf until it was heard of.

    `ready` and `uplink_mb_s` are of the newest news, its own or others'; `heartbeat` is its own
    last word. Without further news it counts as alive until `alive_until`.
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
    ready: bool = False
    uplink_mb_s: float = 0.0
    heartbeat: Heartbeat | None = None

    def alive(self, now: float) -> bool:
        return now <= self.alive_until and not self.left

    def news(self, news: Heartbeat | Sighting, known: int, now: float, slowness: float) -> None:
        """`known` is the incarnation that we went by until now: one that left may be back since."""
        if self.last_news > float("-inf") and news.incarnation == self.incarnation:
            # where a new life begins, the gap says how long it was away, not how often it speaks
            gap = min(now - self.last_news, SUSPECT_MAX_S * slowness)
            self.deviation_s += 0.25 * (abs(gap - self.interval_s) - self.deviation_s)
            self.interval_s += 0.125 * (gap - self.interval_s)
        self.left = self.left and news.incarnation == known
        self.incarnation, self.sequence, self.last_news = news.incarnation, news.sequence, now
        self.ready, self.uplink_mb_s = news.ready, news.uplink_mb_s
        patience_s = self.interval_s + 4 * self.deviation_s
        if patience_s < SUSPECT_MIN_S * slowness:
            patience_s = SUSPECT_MIN_S * slowness
        elif patience_s > SUSPECT_MAX_S * slowness:
            patience_s = SUSPECT_MAX_S * slowness
        self.alive_until = now + patience_s


@dataclass
class Membership:
    """The members other than this node. Nothing depends on hashing: both dictionaries are in the
    order of the news.

    `revision` grows whenever other candidates may follow, and those of whom it is so are `changed`.
    """

    me: PeerId
    members: dict[PeerId, Member] = field(default_factory=dict)
    """Whom there was news of last comes last."""
    revision: int = 0
    changed: dict[PeerId, None] = field(default_factory=dict)
    """Whoever keeps the candidates in order empties it."""
    _voices: dict[PeerId, Member] = field(default_factory=dict)
    """Those with a word of their own; who spoke last comes last."""

    # ---------------------------------------------------------------- news

    def meet(self, peer: PeerId, now: float) -> Member | None:
        """The member, made if need be; None for ourselves or when the view is full of living
        members.
        """
        member = self.members.get(peer)
        if member or peer == self.me:
            return member
        if len(self.members) >= MEMBERS_MAX and not self._forget_one(now):
            return None
        member = self.members[peer] = Member(peer, since=now)
        return member

    def heard(self, peer: PeerId, heartbeat: Heartbeat, now: float) -> bool:
        """Takes in a direct heartbeat; False when it is old news. A member's own word overrides all
        gossip about it.
        """
        member = self.meet(peer, now)
        last = member.heartbeat if member else None
        if not member or (last and heartbeat.number <= last.number):
            return False
        slowness = self.slowness
        self._news(member, heartbeat, last.incarnation if last else -1, now, slowness)
        member.heartbeat = replace(heartbeat, sightings=())
        self._voices.pop(peer, None)
        self._voices[peer] = member
        self._overheard(heartbeat.sightings, now, slowness)
        return True

    def _overheard(self, sightings: tuple[Sighting, ...], now: float, slowness: float) -> None:
        members = self.members
        for sighting in sightings:
            peer, incarnation, sequence, _, _ = sighting
            member = members.get(peer)
            if member is None and len(members) < HEARSAY_MAX:
                member = self.meet(peer, now)
            if member is None or incarnation < member.incarnation:
                continue
            if incarnation > member.incarnation or sequence > member.sequence:
                self._news(member, sighting, member.incarnation, now, slowness)

    def _news(
        self, member: Member, news: Heartbeat | Sighting, known: int, now: float, slowness: float
    ) -> None:
        ready, left, uplink_mb_s = member.ready, member.left, member.uplink_mb_s
        member.news(news, known, now, slowness)
        noise = uplink_mb_s == member.uplink_mb_s or (
            weight(uplink_mb_s) == weight(member.uplink_mb_s)
        )
        if ready != member.ready or left != member.left or not noise:
            self._changes(member.peer)
        del self.members[member.peer]
        self.members[member.peer] = member

    def left(self, peer: PeerId) -> None:
        if member := self.members.get(peer):
            if not member.left:
                self._changes(peer)
            member.left = True

    def forget(self, now: float) -> None:
        """Drops who has been silent or gone for `FORGET_S`."""
        silent = takewhile(
            lambda m: now - max(m.since, m.last_news) > FORGET_S, self.members.values()
        )
        for member in list(silent):
            self._drop(member.peer)

    def _forget_one(self, now: float) -> bool:
        """Makes room: first the dead go, then those who never said anything themselves."""
        idle = [m for m in self.members.values() if not m.alive(now) or not m.heartbeat]
        if idle:
            oldest = min(idle, key=lambda m: (m.alive(now), max(m.since, m.last_news), m.peer))
            self._drop(oldest.peer)
        return bool(idle)

    def _drop(self, peer: PeerId) -> None:
        if self.members.pop(peer).ready:
            self._changes(peer)
        self._voices.pop(peer, None)

    def _changes(self, peer: PeerId) -> None:
        self.revision += 1
        self.changed[peer] = None

    # ---------------------------------------------------------------- what follows from it

    @property
    def slowness(self) -> float:
        """By how much everything takes longer than in a small swarm."""
        return max(1.0, sqrt(len(self.members) / UNHURRIED_MEMBERS))

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats."""
        return HEARTBEAT_S * self.slowness

    def alive(self, now: float) -> list[Member]:
        """All living members, by name. Costs a look at every member."""
        return sorted((m for m in self.members.values() if m.alive(now)), key=lambda m: m.peer)

    def is_alive(self, peer: PeerId, now: float) -> bool:
        return peer == self.me or (peer in self.members and self.members[peer].alive(now))

    def tells_all(self, now: float) -> bool:
        """Whether the swarm is small enough that everybody tells everybody."""
        alive = (m for m in reversed(self.members.values()) if m.alive(now))
        return next(islice(alive, ALL_TO_ALL_MAX, None), None) is None

    def voices(self, now: float, at_most: int = VOICES_MAX) -> list[tuple[Member, Heartbeat]]:
        """Living members with their own last word, whoever spoke last first."""
        voices: list[tuple[Member, Heartbeat]] = []
        for member in reversed(self._voices.values()):
            if member.heartbeat and member.alive_until >= now and not member.left:
                voices.append((member, member.heartbeat))
                if len(voices) == at_most:
                    break
        return voices

    def ready(self, now: float, at_most: int = VOICES_MAX) -> list[tuple[Member, Heartbeat]]:
        """Those of the voices that can contribute."""
        return [(m, h) for m, h in self.voices(now, at_most) if h.ready]

    def candidate(self, peer: PeerId) -> float | None:
        """The uplink of one that could synchronize; None for all others."""
        member = self.members.get(peer)
        return member.uplink_mb_s if member and member.ready and not member.left else None

    def audience(self, now: float, rng: random.Random) -> list[PeerId]:
        """Whom to tell the next news: everybody in a small swarm, else some; and one or two that
        seem dead, to find out.
        """
        members = self._some(LOOK_MAX, rng)
        alive = [m.peer for m in members if m.alive(now)]
        silent = [
            m.peer
            for m in members
            if not m.alive(now) and not m.left and now - max(m.since, m.last_news) < FORGET_S
        ]
        chosen = alive if len(alive) <= ALL_TO_ALL_MAX else rng.sample(alive, FANOUT)
        return chosen + rng.sample(silent, min(2, len(silent)))

    def _some(self, num: int, rng: random.Random) -> list[Member]:
        """All members, or of many a sample, by name."""
        names = list(self.members)
        return [self.members[peer] for peer in sorted(_drawn(names, num, rng))]

    def sightings(self, now: float, rng: random.Random) -> tuple[Sighting, ...]:
        """The living of few members; of many the freshest, and as many drawn of all."""
        members, num = self.members, len(self.members)
        drawn: list[PeerId] = []
        if num > SIGHTINGS_MIN:
            num = max(SIGHTINGS_MIN, min(num // FANOUT, SIGHTINGS_MAX)) // 2
            drawn = rng.sample(list(members), num)
        alive = (m for m in reversed(members.values()) if m.alive(now))
        named = {m.peer: m for m in islice(alive, num)}
        named |= {peer: members[peer] for peer in drawn if members[peer].alive(now)}
        return tuple(
            Sighting(m.peer, m.incarnation, m.sequence, m.ready, m.uplink_mb_s)
            for m in named.values()
        )


def _drawn(names: list[PeerId], num: int, rng: random.Random) -> list[PeerId]:
    return names if len(names) <= num else rng.sample(names, num)
