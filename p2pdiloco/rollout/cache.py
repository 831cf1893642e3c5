"""All keys and values within one budget: rows of running sequences, and prefixes to reuse.

Admission is by memory: a sequence gets a row only if rows as long as the longest admitted sequence
may become fit in the budget, so what runs never has to be thrown out. What the rows do not need
belongs to the prefixes; the least recently used give way.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from p2pdiloco.rollout.prefixes import BLOCK_TOKENS, PrefixTree
from p2pdiloco.rollout.rows import LENGTH_STEP, Rows


class Cache:
    """Row i belongs to the i-th running sequence; `release` moves the last one into the gap."""

    def __init__(self, model: PreTrainedModel, num_bytes: int, *, reuse: bool = True) -> None:
        """`num_bytes` bounds what stays allocated; a change of geometry briefly needs one layer
        twice. Without `reuse` no prefix is kept."""
        self.rows = Rows(model)
        self.prefixes = PrefixTree()
        self.num_slots_max = num_bytes // self.rows.slot_bytes
        self._lengths_max: list[int] = []
        self._reuse = reuse

    @property
    def num_slots(self) -> int:
        """Slots allocated now, in rows and prefixes."""
        return self.rows.num_slots + self.prefixes.num_slots

    def could_admit(self, length_max: int) -> bool:
        """Whether a sequence this long fits when it is alone."""
        return _rounded(length_max) <= self.num_slots_max

    def num_rows_of(self, length_max: int) -> int:
        """Sequences this long that may run at once."""
        return self.num_slots_max // _rounded(length_max)

    def admit(self, tokens: Sequence[int], length_max: int) -> int | None:
        """Gives the next row; says how many leading tokens it holds already. None if it must wait.

        The last token is never among them: the model has to see it to give the next one.
        """
        num_rows = len(self._lengths_max) + 1
        length = _rounded(max([*self._lengths_max, length_max]))
        if num_rows * length > self.num_slots_max:
            return None
        blocks = self.prefixes.match(tokens[:-1])
        self._make_room(num_rows, length)
        self._lengths_max.append(length_max)
        if blocks:
            self.rows.load(num_rows - 1, torch.cat(blocks, dim=3))
        return len(blocks) * BLOCK_TOKENS

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Remembers the prefixes of these tokens, all of which the row holds."""
        if not self._reuse:
            return
        tokens = tokens[: self.num_slots_max - self.rows.num_slots]
        missing = len(tokens) - self.prefixes.num_matched(tokens)
        self.prefixes.evict(self.num_slots + missing - self.num_slots_max)
        self.prefixes.insert(tokens, lambda start, end: self.rows.stored(row, start, end))

    def release(self, row: int, num_held_by_last: int) -> None:
        """Frees a row. The last row, of which so many slots are in use, takes its place."""
        last = len(self._lengths_max) - 1
        if row != last:
            self.rows.move(last, row, num_held_by_last)
            self._lengths_max[row] = self._lengths_max[last]
        self._lengths_max.pop()
        if len(self._lengths_max) * 4 <= self.rows.num_rows:
            self._shrink()

    def _make_room(self, num_rows: int, length: int) -> None:
        """Doubles the rows rather than adding one, where that fits, to copy them seldom."""
        if num_rows > self.rows.num_rows or length > self.rows.length:
            roomy = min(_power_of_two(num_rows), self.num_slots_max // length)
            self.prefixes.evict(roomy * length + self.prefixes.num_slots - self.num_slots_max)
            self.rows.resize(roomy, length)

    def _shrink(self) -> None:
        """To what runs, so that prefixes have the room."""
        length = _rounded(max(self._lengths_max, default=0))
        self.rows.resize(len(self._lengths_max), length)


def _rounded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
