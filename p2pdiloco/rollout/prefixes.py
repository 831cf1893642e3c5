"""Keys and values of token prefixes that were computed before: a tree over blocks of tokens.

A path from the root spells a prefix; each node holds one block's keys and values. Turns of one
trajectory share their history, trajectories of a group their prompt. The tree belongs to one policy
version: other weights have other keys and values, so a swap of weights clears it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

BLOCK_TOKENS = 16
"""Small enough that little of a shared prompt is computed twice, large enough to copy well."""


@dataclass(eq=False, slots=True)
class _Node:
    parent: "_Node | None"
    block: tuple[int, ...]
    slots: Tensor | None
    """[layers, 2, heads, BLOCK_TOKENS, head size]; the root has none."""
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)


class PrefixTree:
    """Whole blocks only. The caller bounds it by `evict`."""

    def __init__(self) -> None:
        self._root = _Node(None, (), None)
        self._by_age: OrderedDict[_Node, None] = OrderedDict()
        """Least recently used first. A child is never younger than its parent, so the first is a
        leaf."""

    @property
    def num_slots(self) -> int:
        """Tokens whose keys and values are stored."""
        return len(self._by_age) * BLOCK_TOKENS

    def match(self, tokens: Sequence[int]) -> list[Tensor]:
        """The stored blocks of the longest known prefix, which counts as used."""
        path = self._path(tokens)
        self._touch(path)
        return [node.slots for node in path if node.slots is not None]

    def num_matched(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest known prefix; asking does not count as use."""
        return len(self._path(tokens)) * BLOCK_TOKENS

    def insert(self, tokens: Sequence[int], stored: Callable[[int, int], Tensor]) -> None:
        """Adds the whole blocks of this prefix; `stored(start, end)` copies what is missing."""
        path = self._path(tokens)
        node = path[-1] if path else self._root
        for start in range(len(path) * BLOCK_TOKENS, _whole(tokens), BLOCK_TOKENS):
            end = start + BLOCK_TOKENS
            child = _Node(node, tuple(tokens[start:end]), stored(start, end))
            node.children[child.block] = child
            path.append(child)
            node = child
        self._touch(path)

    def evict(self, num_slots: int) -> None:
        """Frees the least recently used blocks, at least so many slots or all there are."""
        for _ in range(-(-num_slots // BLOCK_TOKENS)):
            if not self._by_age:
                return
            leaf, _nothing = self._by_age.popitem(last=False)
            assert leaf.parent is not None and not leaf.children
            del leaf.parent.children[leaf.block]

    def clear(self) -> None:
        """Forgets everything, and frees it at once: parents and children hold each other."""
        for node in self._by_age:
            node.parent, node.slots = None, None
            node.children.clear()
        self._root.children.clear()
        self._by_age.clear()

    def _path(self, tokens: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        for start in range(0, _whole(tokens), BLOCK_TOKENS):
            child = node.children.get(tuple(tokens[start : start + BLOCK_TOKENS]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_age[node] = None
            self._by_age.move_to_end(node)


def _whole(tokens: Sequence[int]) -> int:
    return len(tokens) - len(tokens) % BLOCK_TOKENS
