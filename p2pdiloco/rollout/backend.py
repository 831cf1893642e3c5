"""What the rollout worker needs of an engine. There are two: `engine` and `vllm_engine`."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from p2pdiloco.rollout.pace import Pace
from p2pdiloco.rollout.request import Progress, Request
from p2pdiloco.rollout.verify import Referee


class Backend(Protocol):
    """Generates with one policy. One call at a time.

    Tokens are those of the rule (sampling.py) applied to the canonical logits (verify.py), so two
    backends give the same ones. `tests/unit/test_rollout_backends.py` holds each of them to it.
    """

    @property
    def model(self) -> PreTrainedModel:
        """The policy, for replays; only `swap` changes its weights."""

    @property
    def referee(self) -> Referee:
        """Its margin is what replays allow for."""

    @property
    def version(self) -> int:
        """Of the policy."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values there is room for."""

    @property
    def cache_share(self) -> float:
        """Of `cache_tokens`, what is in use."""

    @property
    def prefix_tokens(self) -> int:
        """Of `cache_tokens`, room for prefixes, those of running sequences included; at least 1."""

    @property
    def num_drafted(self) -> int:
        """Draft tokens tried; 0 for ever where nothing is drafted."""

    @property
    def num_held(self) -> int:
        """Of those, the ones that the rule confirmed."""

    @property
    def busy_s(self) -> float:
        """Spent in steps, by the clock of the backend."""

    @property
    def pace(self) -> Pace: ...

    def num_rows_of(self, length_max: int) -> int:
        """Sequences of this length that run at once."""

    def submit(self, request: Request) -> None:
        """Queues a request. `QueueFull` if too many wait, `ValueError` if it can never run."""

    def cancel(self, request_id: str) -> None:
        """Ends a request; the next step reports it. Unknown ids are ignored: the request may have
        ended meanwhile."""

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Overwrites the weights in place, between two steps. Running requests go on: their next
        tokens are of the new version, and nothing that the old weights computed is used for them.

        ValueError if the weights are of another model.
        """

    def calibrate(self) -> None:
        """Measures the pace. The backend must be idle."""

    def step(self) -> list[Progress]:
        """What a pass of the model added to each request, and which were cancelled."""
