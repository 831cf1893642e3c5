"""What a node knows of one fragment. Fragments are independent registers: nothing here looks at
another fragment.
"""

from dataclasses import dataclass

from p2pdiloco.protocol.actions import CatchUp
from p2pdiloco.protocol.lineage import Chain, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.round import Round
from p2pdiloco.protocol.wire import ContributionReady, Head


@dataclass(slots=True)
class Offer:
    """Our part in somebody's round. `report` is None until the outer gradient lies ready."""

    round: RoundId
    synchronizer: PeerId
    preparing: bool = False
    report: ContributionReady | None = None

    @property
    def tokens(self) -> int:
        return self.report.tokens if self.report else 0


@dataclass(frozen=True, slots=True)
class Pursuit:
    """A catch-up under way towards the last of `lineage`, which `source` told us of."""

    catch_up: CatchUp
    lineage: tuple[Record, ...]
    source: PeerId

    @property
    def target(self) -> int:
        snapshot = self.catch_up.snapshot
        return self.lineage[-1].version if self.lineage else (snapshot.version if snapshot else 0)

    @property
    def is_news(self) -> bool:
        """Whether it is about the next merge alone."""
        return self.catch_up.snapshot is None and len(self.catch_up.records) == 1


@dataclass(slots=True)
class Register:
    """`chain` is None while we hold no state; `installed` is the version that the learner trains
    on, if any, `handed` the digest of the newest one given to it.

    `steps` are inner steps since the learner received `installed`. `fence` is the highest (term,
    attempt) seen. `asked` was asked for its records after version `asked_after` at
    `asked_at`.
    """

    index: int
    chain: Chain | None = None
    installed: int | None = None
    handed: str | None = None
    steps: int = 0
    fence: tuple[int, int] = (0, 0)
    offer: Offer | None = None
    round: Round | None = None
    opened_at: float = float("-inf")
    """When we opened a round of it last: one whose rounds fail must not keep the others waiting."""
    reopen_at: float = float("-inf")
    """Not before this do we open another round of it, after one that failed."""
    pursuit: Pursuit | None = None
    asked: PeerId | None = None
    asked_after: int = 0
    asked_at: float = 0.0
    retry_at: float = 0.0
    failures: int = 0
    distrusted: bool = False
    """Our own state was damaged, or led to another digest than a record's: a snapshot mends it."""
    damaged: int = 0
    """How often our own state was found damaged in memory."""
    mended_at: float | None = None
    """When it was last replaced after that."""
    doubted: str | None = None
    """Digest of that record. If a state from others leads elsewhere too, the record is wrong."""
    disbelieved: str | None = None
    """Digest of a record found wrong: it is followed no more."""
    due_since: float | None = None
    median_done: tuple[int, float] = (-1, 0.0)
    """The version on which the median learner was last seen to be done with its share, and when."""
    asks_for_time: bool = False
    """Whether a sync of it would disturb what shares this machine just now."""
    installed_at: float = 0.0
    loss_then: float | None = None
    """Of the learner's step before it received `installed`."""
    paced: tuple[str, int] = ("", 0)
    """Of the head with this digest, how many steps after its appointment it came."""
    news_of: int = -1
    news_at: float = 0.0
    """When a heartbeat first spoke of the version `news_of`."""
    newest_seen: int = -1
    """The newest version that anybody holds, as far as we know."""

    @property
    def version(self) -> int:
        return self.chain.version if self.chain else -1

    def gains_from(self, weight: tuple[int, int]) -> bool:
        """Whether it is worth asking for a lineage of this weight."""
        if self.chain is None:
            return True
        return weight > self.chain.weight or (self.distrusted and weight == self.chain.weight)

    def gains_from_head(self, head: Head) -> bool:
        """The same for what a heartbeat announces, which is most often what we hold."""
        chain = self.chain
        if head.version < 0 or chain is None:
            return head.version >= 0
        if head.digest == chain.digest:
            return self.distrusted
        return self.gains_from(head.weight)

    def attempt_in(self, term: int) -> int:
        """The highest attempt seen in this term."""
        return self.fence[1] if self.fence[0] == term else 0

    @property
    def busy(self) -> bool:
        """Whether the replica's state of this fragment is being changed or asked for."""
        return self.pursuit is not None or self.asked is not None
