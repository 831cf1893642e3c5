"""The names that every message, event and action speaks of."""

from dataclasses import dataclass
from typing import Annotated, Literal, NewType

from pydantic import Field

PeerId = NewType("PeerId", str)
"""Base58 text of a libp2p peer id; the Ed25519 public key can be read out of it."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
PeerText = Annotated[PeerId, Field(min_length=1, max_length=128, pattern=r"^[!-~]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""blake2b-256, in hex."""
SENTENCE_CHARS_MAX = 200
Sentence = Annotated[str, Field(max_length=SENTENCE_CHARS_MAX, pattern=r"^\P{Cc}*$")]
"""Text for people; without control characters, since logs and terminals show it."""
FragmentIndex = Annotated[int, Field(ge=0, lt=4096)]


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """One try at one merge: `version` of `fragment` is to be made under the fencing token (term,
    attempt).
    """

    fragment: FragmentIndex
    version: Annotated[int, Field(ge=1, lt=2**53)]
    term: Count
    attempt: Count

    @property
    def fence(self) -> tuple[int, int]:
        return self.term, self.attempt

    def __str__(self) -> str:
        return f"fragment {self.fragment} v{self.version} (term {self.term}.{self.attempt})"


MixPart = Literal["start", "outer", "local"]
"""The parameters at the start of a round, the outer gradient at its end; or the learner's values,
in a swarm below its quorum.
"""


@dataclass(frozen=True, slots=True, order=True)
class MixId:
    """One exchange of vectors among partners that gossip: in `round` of a fragment its `part`."""

    fragment: int
    round: int
    part: MixPart

    def __str__(self) -> str:
        return f"{self.part} of round {self.round} of fragment {self.fragment}"


def sentence(text: str) -> str:
    """`text` as a `Sentence`: printable, and cut if it is too long."""
    return "".join(c if c.isprintable() else " " for c in text[:SENTENCE_CHARS_MAX])
