"""Which tensors form which fragment: balanced tensor fragmentation.

Decoupled DiLoCo (arXiv 2604.21428), section "balanced tensor fragmentation": the unit is a whole
tensor; tensors are sorted by size, descending, and each goes into the currently smallest bin, which
keeps the largest bin within 4/3 of the optimum (the classic bound of
longest-processing-time-first). Ours differs in one point: the embedding tensors form fragment 0,
because the paper merges the embedding component by plain mean and the rest by RDA (see merge.py).

Every node computes the plan itself from names and shapes, so it depends on nothing else: ties go by
name, and inside a fragment tensors stand in order of their names. A fragment's value is one flat
float32 vector of its tensors in that order.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from p2pdiloco.errors import UserError
from p2pdiloco.spec import RunSpec


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor and its place in the fragment's flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Of its first element, in elements from the start of the fragment vector."""
    is_embedding: bool
    """Merged by plain mean under every rule."""

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def span(self) -> slice:
        """The elements of this tensor in the fragment vector."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A set of whole tensors that is merged as one."""

    index: int
    slots: tuple[TensorSlot, ...]

    @property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return sum(slot.size for slot in self.slots)


def plan_fragments(
    shapes: Mapping[str, tuple[int, ...]], num_fragments: int, embeddings: Collection[str]
) -> tuple[Fragment, ...]:
    """Cut a model into `num_fragments` fragments; the same on every node.

    With one fragment everything is in it. With more, fragment 0 holds the `embeddings` and the
    others share the rest; a model without embeddings shares all its tensors over all fragments.
    UserError if some fragment would stay empty.
    """
    assert set(embeddings) <= set(shapes), f"not tensors: {set(embeddings) - set(shapes)}"
    rest = [name for name in shapes if name not in embeddings]
    own_fragment = [sorted(embeddings)] if embeddings and num_fragments > 1 else []
    shared = rest if own_fragment else list(shapes)
    _check_count(num_fragments, len(own_fragment) + len(shared))
    bins = own_fragment + _balance(shapes, shared, num_fragments - len(own_fragment))
    return tuple(_lay_out(i, names, shapes, embeddings) for i, names in enumerate(bins))


def fragments_of(spec: RunSpec) -> tuple[Fragment, ...]:
    """The plan of a run, from the layout in its genesis; UserError as `plan_fragments`."""
    assert spec.genesis, "a draft has no layout yet"
    tensors = spec.genesis.tensors
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    embeddings = [tensor.name for tensor in tensors if tensor.is_embedding]
    return plan_fragments(shapes, spec.sync.num_fragments, embeddings)


def _check_count(num_fragments: int, largest: int) -> None:
    if not 1 <= num_fragments <= largest:
        raise UserError(
            f"This model cannot be cut into {num_fragments} fragments: "
            "a fragment holds at least one whole tensor. "
            f"Set sync.num_fragments to a number from 1 to {largest}."
        )


def _balance(
    shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], num_bins: int
) -> list[list[str]]:
    """LPT: the largest remaining tensor into the smallest bin; ties by name, then by bin number."""
    bins: list[list[str]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for name in sorted(names, key=lambda name: (-math.prod(shapes[name]), name)):
        load, number = heapq.heappop(loads)
        bins[number].append(name)
        heapq.heappush(loads, (load + math.prod(shapes[name]), number))
    return bins


def _lay_out(
    index: int,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    embeddings: Collection[str],
) -> Fragment:
    slots: list[TensorSlot] = []
    offset = 0
    for name in sorted(names):
        slots.append(TensorSlot(name, tuple(shapes[name]), offset, name in embeddings))
        offset += slots[-1].size
    return Fragment(index, tuple(slots))
