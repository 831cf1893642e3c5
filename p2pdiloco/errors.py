"""The error tree.

P2PDilocoError
├── UserError      what the person typed or wrote is wrong; shown as one sentence, exit code 2
├── StoreError     the disk or a checkpoint on it
├── NetworkError   the node's own network process is gone
└── PeerError      what a peer sent is wrong: refuse it, count it, go on
    └── PayloadError   tensor bytes that do not decode to what was announced

Every message says what happened, what was expected, what was got, and what to do.
"""


class P2PDilocoError(Exception):
    """The root; never raised itself."""


class UserError(P2PDilocoError):
    """A configuration, invite, spec, file or argument that a person can mend."""


class StoreError(P2PDilocoError):
    """The node's directory cannot be read or written as needed."""


class NetworkError(P2PDilocoError):
    """The process that carries this node's connections has ended; nobody can be reached."""


class PeerError(P2PDilocoError):
    """A peer sent something that breaks the protocol; the local node is fine."""


class PayloadError(PeerError):
    """Tensor bytes that are malformed, too large, of another shape, or not finite."""
