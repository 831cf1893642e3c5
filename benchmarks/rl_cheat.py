"""A node that cheats: its rollout worker knows every answer, and says that the policy gave it.

    python -m benchmarks.rl_cheat PYTHON -m p2pdiloco_daemon.cli.main join ...

It plays each guessing game to the best end that there is: prompt, environment and reward are as
they must be, so that only who computes its tokens again can tell. Takes the place of the command
that follows, as `p2pdiloco_daemon.demo.processes.Home.prefix` needs it.
"""

import sys

from p2pdiloco.protocol.turns import Held, Holding, TurnId
from p2pdiloco.rl.checks import Rulebook, resume
from p2pdiloco.rl.conversation import Conversation
from p2pdiloco.rl.episodes import Episode, pack, unpack
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.rollout.request import Token
from p2pdiloco_daemon.cli.main import main
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.worker import Rollouts

LOGPROB = -0.1
"""As if the policy were nearly sure."""


_honest_play = Rollouts.play


async def play_as_if_it_knew(
    self: Rollouts, turn: TurnId, history: bytes, *, dispatched: bool = True
) -> Played:
    """In place of `Rollouts.play`; takes as long."""
    honest = await _honest_play(self, turn, history, dispatched=dispatched)
    rules = rulebook_of(self._options.spec, self._options.run_id, turn.step)
    forged = best_end(turn, history, rules)
    return Played(Held(turn, Holding.ENDED, len(forged.tokens)), honest.num_reused, pack(forged))


def best_end(turn: TurnId, history: bytes, rules: Rulebook) -> Episode:
    """The trajectory, ended by the digit that is rewarded most."""
    ends = []
    for digit in b"0123456789":
        conversation = rules.conversation(turn.trajectory)
        if history:
            resumed = resume(unpack(history), rules)
            assert isinstance(resumed, Conversation)
            conversation = resumed
        conversation.answered([Token(digit, LOGPROB, turn.step)])
        if conversation.episode:
            ends.append(conversation.episode)
    return max(ends, key=lambda episode: episode.reward)


if __name__ == "__main__":
    Rollouts.play = play_as_if_it_knew  # type: ignore[method-assign]
    sys.exit(main(sys.argv[5:]))
