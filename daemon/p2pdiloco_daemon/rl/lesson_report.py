"""What a learner of rollouts says of its shares, added up."""

from dataclasses import dataclass, field

from p2pdiloco_daemon.learner.learner import Learned
from p2pdiloco_daemon.status import view
from p2pdiloco_daemon.status.curve import Curve


@dataclass
class LessonReport:
    """Of an rl run."""

    last: Learned | None = None
    episodes: int = 0
    learnt_from: int = 0
    dropped: int = 0
    rewards: Curve = field(default_factory=Curve)

    def take(self, learned: Learned) -> None:
        self.last = learned
        self.episodes += learned.num_episodes
        self.learnt_from += learned.num_learnt_from
        self.dropped += learned.num_dropped
        self.rewards.add(learned.step, learned.reward)

    def status(self) -> view.Learning:
        last = self.last
        return view.Learning(
            step=last.step if last else None,
            reward=last.reward if last else None,
            drift=last.drift if last and last.num_learnt_from else None,
            episodes=self.episodes,
            learnt_from=self.learnt_from,
            dropped=self.dropped,
        )
