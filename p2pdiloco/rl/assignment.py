"""Which tasks a step has, and with what randomness: functions of (run, step, owner) alone.

So nobody chooses the question it is good at or the noise that suits it, and a checker knows what
had to be done. The owner is the node to whose share the tasks belong; the tasks that a dispatcher
places on everybody have the owner "".

Trajectory i belongs to group i // group_size. A group shares its environment's seed, each
trajectory has its own noise.
"""

from dataclasses import dataclass
from hashlib import blake2b

from p2pdiloco.protocol.naming import PeerId

SHARED = PeerId("")
"""The owner of the tasks that a dispatcher places."""


@dataclass(frozen=True, slots=True)
class StepTasks:
    """The tasks of one step for one owner."""

    run_id: str
    step: int
    owner: PeerId
    num_groups: int
    group_size: int

    @property
    def num_trajectories(self) -> int:
        return self.num_groups * self.group_size

    def group_of(self, trajectory: int) -> int:
        return trajectory // self.group_size

    def environment_seed(self, trajectory: int) -> int:
        """Below 2^63, the same for a group."""
        return self._digest(f"environment/{self.group_of(trajectory)}")

    def noise_name(self, trajectory: int) -> str:
        """What the sampling noise of the trajectory is keyed by (rollout/sampling.py)."""
        return f"{self.step}/{self.owner}/{trajectory}"

    def noise_seed(self) -> int:
        """Below 2^63."""
        return self._digest("noise")

    def _digest(self, what: str) -> int:
        text = f"{self.run_id}/{self.step}/{self.owner}/{what}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
