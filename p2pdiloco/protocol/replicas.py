"""What a dispatcher believes of one replica: its speed, its cache, what it is at.

Beliefs come from reports and from what was placed there; they may be wrong and then cost time,
never a turn. An estimated completion has the parts of Dynamo's and Preble's cost functions, with
the speed of this replica in each:

    wait for a place + prompts ahead + uncached prompt / prefill speed
        + expected turns * (link + expected tokens * seconds per token at the batch with it)

The turns are those of the whole trajectory from here on, since it will stay.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.turns import Load
from p2pdiloco.protocol.window import Window

FOLLOW = 0.2
"""Weight of a new turn in the mean time that a trajectory takes per turn."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a turn needs, as a replica sees it."""

    trajectory: int
    group: int
    group_tokens: int
    """Of the group's prompt, with which the trajectory begins."""
    num_tokens: int
    """Of the turn's prompt."""
    new_tokens: float
    """Expected of one answer."""
    turns_left: float
    """Expected, this one included."""

    @property
    def own_tokens(self) -> float:
        """Cache that the turn takes beside the group's prompt."""
        return self.num_tokens - self.group_tokens + self.new_tokens


class PrefixMemory:
    """Which prefixes a replica still has, guessed: a group's prompt once, and each trajectory's own
    part; the least recently used are gone first."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._total = 0

    def num_cached(self, need: Need) -> int:
        """Of the turn's prompt, tokens that need not be computed."""
        shared = self._tokens.get(("group", need.group), 0)
        own = self._tokens.get(("trajectory", need.trajectory), 0) if shared else 0
        return min(shared + own, need.num_tokens)

    def keep(self, need: Need, capacity: int) -> None:
        """The turn's prompt is computed."""
        self._put(("trajectory", need.trajectory), need.num_tokens - need.group_tokens)
        self._put(("group", need.group), need.group_tokens)
        while self._total > capacity:
            self._total -= self._tokens.popitem(last=False)[1]

    def forget(self, trajectory: int) -> None:
        """It has ended: its own part is of no more use, and soon gone."""
        self._total -= self._tokens.pop(("trajectory", trajectory), 0)

    def _put(self, key: tuple[str, int], num_tokens: int) -> None:
        self._total += num_tokens - self._tokens.pop(key, 0)
        self._tokens[key] = num_tokens


@dataclass(slots=True)
class _Active:
    need: Need
    since: float
    computed: int
    """Tokens of the prompt that were computed here in earlier turns."""
    generating: bool = True


class Replica:
    """One worker's engine. Active are trajectories whose turn is generated or acted on there."""

    def __init__(self, name: PeerId, load: Load, rtt_s: float) -> None:
        self.name = name
        self.load = load
        self.rtt_s = rtt_s
        self._token_s: dict[int, float] = {}
        self.window = Window(float(load.num_rows))
        self.memory = PrefixMemory()
        self.num_generating = 0
        self._active: dict[int, _Active] = {}
        self._own_tokens = 0.0
        self._groups: Counter[int] = Counter()
        """Active trajectories of each group that has any."""
        self._group_tokens = 0
        self.cycle_s = 0.0
        """Mean time of a trajectory per turn here, environment included; 0 before it is known."""
        self._prefilled_at = 0.0

    def reported(self, load: Load, rtt_s: float) -> None:
        """News of its engine."""
        self.load, self.rtt_s = load, rtt_s
        self._token_s = {}

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def use(self) -> float:
        """Share of the cache that the active trajectories need; a group's prompt counts once."""
        return (self._own_tokens + self._group_tokens) / self.load.cache_tokens

    @property
    def num_free(self) -> int:
        """Turns that may be placed here now, as far as window and rows go."""
        return min(
            int(self.window.size) - self.num_active, self.load.num_rows - self.num_generating
        )

    def fits(self, need: Need) -> bool:
        """With it the active trajectories still fit into the cache; one alone always does."""
        shared = 0 if self._groups[need.group] else need.group_tokens
        more = (need.own_tokens + shared) / self.load.cache_tokens
        return not self._active or self.use + more <= 1.0

    def hit(self, need: Need) -> float:
        """Share of the prompt that is cached here."""
        return self.memory.num_cached(need) / need.num_tokens

    def completion_s(self, need: Need, ahead: float, now: float) -> float:
        """Seconds until the trajectory would end, were it not for its environment, if `ahead`
        others wait for a place here."""
        turn_s = self.rtt_s + need.new_tokens * self.token_s(self.num_generating + 1)
        return self._wait_s(need, ahead) + self._prefill_s(need, now) + need.turns_left * turn_s

    def turn_s(self, need: Need, now: float) -> float:
        """Seconds until the turn would be generated, if it were placed now. Beyond the engine's
        rows it has to queue there."""
        batch = min(self.num_generating + 1, self.load.num_rows)
        decode_s = need.new_tokens * self.token_s(batch)
        queued = self.num_generating // self.load.num_rows
        return self.rtt_s + self._prefill_s(need, now) + decode_s * (1 + queued)

    def place(self, need: Need, computed: int, now: float) -> None:
        """The turn goes here; so many tokens of its prompt were computed here in earlier turns."""
        self._prefilled_at = now + self._prefill_s(need, now)
        self._enter(need, _Active(need, now, computed))
        self.memory.keep(need, self.load.cache_tokens)

    def adopt(self, need: Need, now: float, *, generating: bool) -> None:
        """The trajectory is found to be active here."""
        self.left(need.trajectory, now)
        self._enter(need, _Active(need, now, 0, generating))
        self.memory.keep(need, self.load.cache_tokens)

    def holds(self, need: Need) -> None:
        """The trajectory's history is found to be here."""
        self.memory.keep(need, self.load.cache_tokens)

    def finished(self, need: Need, num_reused: int, num_wanted: int) -> None:
        """The turn is generated, and `need` what the trajectory needs with it; `num_wanted` is how
        wide a window would be used."""
        active = self._active.get(need.trajectory)
        self.memory.keep(need, self.load.cache_tokens)
        if active is None or not active.generating:
            return
        active.generating = False
        self.num_generating -= 1
        if active.computed:
            self.window.observe(min(1.0, num_reused / active.computed), self.use)
            self.window.bound(num_wanted)
        self._own_tokens += need.own_tokens - active.need.own_tokens
        active.need = need

    def left(self, trajectory: int, now: float) -> None:
        """The trajectory is not active here any more; its prefix may stay."""
        active = self._active.pop(trajectory, None)
        if active is None:
            return
        group = active.need.group
        self.num_generating -= active.generating
        self._own_tokens -= active.need.own_tokens
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]
            self._group_tokens -= active.need.group_tokens
        took_s = now - active.since
        before_s = self.cycle_s or took_s
        self.cycle_s = before_s + FOLLOW * (took_s - before_s)

    def token_s(self, batch: int) -> float:
        """Seconds per token of each sequence."""
        if batch not in self._token_s:
            self._token_s[batch] = _interpolated(self.load.token_s, batch)
        return self._token_s[batch]

    def _enter(self, need: Need, active: _Active) -> None:
        if not self._groups[need.group]:
            self._group_tokens += need.group_tokens
        self._groups[need.group] += 1
        self._own_tokens += need.own_tokens
        self.num_generating += active.generating
        self._active[need.trajectory] = active

    def _wait_s(self, need: Need, ahead: float) -> float:
        """Places come free as trajectories end."""
        if self.num_free > 0 and self.fits(need):
            return 0.0
        turn_s = need.new_tokens * self.token_s(max(1, self.num_generating))
        cycle_s = max(turn_s, self.cycle_s)
        return (1 + ahead) * need.turns_left * cycle_s / max(1, self.num_active)

    def _prefill_s(self, need: Need, now: float) -> float:
        """Until the prompt is computed, after those placed before it."""
        uncached = need.num_tokens - self.memory.num_cached(need)
        ahead_s = max(0.0, self._prefilled_at - now)
        return ahead_s + uncached / self.load.prefill_tokens_per_s


def _interpolated(table: Sequence[tuple[int, float]], batch: int) -> float:
    """Linear between cells, proportional to the batch beyond them."""
    below = max((cell for cell in table if cell[0] <= batch), default=table[0])
    above = min((cell for cell in table if cell[0] >= batch), default=table[-1])
    if below[0] >= above[0]:
        return below[1] * max(1.0, batch / below[0])
    share = (batch - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
