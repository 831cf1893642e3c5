"""What can be checked of an episode that a peer generated, and what it proves.

`story` needs no model and is done for every episode: it plays the trajectory again with the
answers as they are, and everything else must follow: the prompt of the assigned task, what the
environment and the tools said, the limits, where it ended, the reward. `resume` does the same for
an episode so far, which another worker goes on with.

`replay.py` does the rest for a random sample: whether the policy chose these tokens.

An episode that passes both is the one that this policy had to produce for this task. So a peer
cannot use another model, another temperature, better-looking samples, or invent text or rewards,
without being seen when it is sampled: of n forged episodes, with a share f re-checked by each of m
nodes on their own, all go unseen with probability (1 - f)^(n m).

What it does not prove: that the peer generated the episode itself rather than copied it from
somebody who did; that it did not hold back episodes it did not like (the dispatcher hands those to
others, and they come out the same); anything of episodes that were not sampled, or of open places
beyond the first few. An engine with other logits than ours, in bf16 say, and a mixture of experts
near a tie of its router, choose other tokens now and then and would be refused: here such nodes are
no cheats, but not checkable. The checker needs the weights of the version, and trusts its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from p2pdiloco.learn.text import Tokenizer
from p2pdiloco.rl.assignment import StepTasks
from p2pdiloco.rl.conversation import Conversation, Limits, Policy
from p2pdiloco.rl.environments import Task
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rollout.request import Token


class Reason(Enum):
    """Why an episode is refused."""

    NOT_ASSIGNED = "it is none of the step's trajectories, or none that can be played"
    WRONG_PROMPT = "it does not begin with the prompt of its task"
    WRONG_STORY = "its environment would not have said that"
    WRONG_LENGTH = "an answer ends where the rules do not end it"
    WRONG_END = "it ends before or after its end"
    WRONG_REWARD = "its reward is another"
    UNKNOWN_TOKEN = "it has a token that the tokenizer does not know"
    WRONG_VERSION = "its tokens are of policies that the step does not allow"
    WRONG_TOKEN = "the policy would not have chosen one of its tokens"
    WRONG_LOGPROB = "a log-probability is not that of the policy"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is wrong, and where."""

    reason: Reason
    position: int
    """Of the first token that it concerns."""

    def __str__(self) -> str:
        return f"{self.reason.value} (token {self.position})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rulebook:
    """What all nodes of a run agree on."""

    tasks: StepTasks
    task: Task
    tokenizer: Tokenizer
    policy: Policy
    limits: Limits
    versions: frozenset[int]
    """Of policies that may have chosen tokens."""

    def conversation(self, trajectory: int) -> Conversation:
        return Conversation(
            self.tasks, trajectory, self.task, self.tokenizer, self.policy, self.limits
        )


def story(episode: Episode, rules: Rulebook) -> Refusal | None:
    """None if all that the policy did not choose is right. Needs no model."""
    played = _played(episode, rules)
    return played if isinstance(played, Refusal) else _end_refusal(episode, played)


def resume(episode: Episode, rules: Rulebook) -> Conversation | Refusal:
    """The conversation that goes on where an episode so far (`Conversation.so_far`) stands, or what
    is wrong with its story."""
    played = _played(episode, rules)
    if isinstance(played, Refusal):
        return played
    if played.episode is not None or episode.is_cut:
        return Refusal(Reason.WRONG_END, len(played.tokens))
    if episode.tokens != tuple(played.tokens):
        difference = _first_difference(episode.tokens, played.tokens)
        return Refusal(Reason.WRONG_STORY, difference)
    if episode.reward:
        return Refusal(Reason.WRONG_REWARD, len(played.tokens))
    return played


def _played(episode: Episode, rules: Rulebook) -> Conversation | Refusal:
    """The conversation after its answers, if all before the last of them is right."""
    tasks = rules.tasks
    if episode.step != tasks.step or episode.trajectory >= tasks.num_trajectories:
        return Refusal(Reason.NOT_ASSIGNED, 0)
    old = next((p for p, _, version in episode.chosen() if version not in rules.versions), None)
    if old is not None:
        return Refusal(Reason.WRONG_VERSION, old)
    size = rules.tokenizer.vocabulary_size
    unknown = next((i for i, token in enumerate(episode.tokens) if token >= size), None)
    if unknown is not None:
        return Refusal(Reason.UNKNOWN_TOKEN, unknown)
    try:
        conversation = rules.conversation(episode.trajectory)
    except ValueError:  # its prompt leaves no room, and it is given up
        return Refusal(Reason.NOT_ASSIGNED, 0)
    for answer in episode.answers:
        written = tuple(conversation.tokens)
        if conversation.episode is not None:
            return Refusal(Reason.WRONG_END, len(written))
        if episode.tokens[: answer.start] != written:
            reason = Reason.WRONG_STORY if conversation.turn else Reason.WRONG_PROMPT
            return Refusal(reason, _first_difference(episode.tokens, written))
        chosen = episode.tokens[answer.start : answer.end]
        if not _ends_rightly(chosen, rules.policy.stop_token, conversation):
            return Refusal(Reason.WRONG_LENGTH, answer.end - 1)
        tokens = zip(chosen, answer.logprobs, answer.versions, strict=True)
        conversation.answered([Token(*token) for token in tokens])
    return conversation


def _ends_rightly(chosen: Sequence[int], stop_token: int, conversation: Conversation) -> bool:
    """At the first stop token, or at the most tokens it may have."""
    num_max = conversation.request().num_tokens_max
    if stop_token in chosen[:-1] or len(chosen) > num_max:
        return False
    return chosen[-1] == stop_token or len(chosen) == num_max


def _end_refusal(episode: Episode, conversation: Conversation) -> Refusal | None:
    end = len(conversation.tokens)
    if episode.tokens != tuple(conversation.tokens):
        difference = _first_difference(episode.tokens, conversation.tokens)
        return Refusal(Reason.WRONG_STORY, difference)
    right = conversation.episode
    if right is None or right.is_cut != episode.is_cut:
        return Refusal(Reason.WRONG_END, end)
    if right.reward != episode.reward:
        return Refusal(Reason.WRONG_REWARD, end)
    return None


def _first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(tokens, others, strict=False)
    shorter = min(len(tokens), len(others))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
