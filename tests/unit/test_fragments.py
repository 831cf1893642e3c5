from itertools import compress, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.errors import UserError
from p2pdiloco.optim.fragments import Fragment, TensorSlot, plan_fragments

SHAPES = {"embed": (10, 4), "b": (3, 5), "a": (15,), "norm": (4,), "scalar": ()}


def test_one_fragment_holds_everything_by_name() -> None:
    (fragment,) = plan_fragments(SHAPES, 1, ["embed"])
    assert [slot.name for slot in fragment.slots] == ["a", "b", "embed", "norm", "scalar"]
    assert [slot.offset for slot in fragment.slots] == [0, 15, 30, 70, 74]
    assert fragment.size == 75


def test_embeddings_are_fragment_zero_and_the_largest_tensors_are_spread() -> None:
    plan = plan_fragments(SHAPES, 3, ["embed"])
    assert [[slot.name for slot in fragment.slots] for fragment in plan] == [
        ["embed"],
        ["a", "norm"],
        ["b", "scalar"],
    ]
    assert [fragment.index for fragment in plan] == [0, 1, 2]
    assert plan[0].slots == (TensorSlot("embed", (10, 4), 0, is_embedding=True),)
    assert not plan[1].slots[0].is_embedding


def test_a_model_without_embeddings_shares_all_fragments() -> None:
    plan = plan_fragments({"a": (4,), "b": (3,), "c": (2,)}, 2, [])
    assert [fragment.size for fragment in plan] == [4, 5]


def test_the_plan_does_not_depend_on_the_order_of_the_mapping() -> None:
    backwards = dict(reversed(SHAPES.items()))
    assert plan_fragments(SHAPES, 3, ["embed"]) == plan_fragments(backwards, 3, ["embed"])


@pytest.mark.parametrize("num_fragments", [0, -1, 6])
def test_an_impossible_count_names_the_largest_possible(num_fragments: int) -> None:
    with pytest.raises(UserError, match="from 1 to 5"):
        plan_fragments(SHAPES, num_fragments, ["embed"])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_every_tensor_is_in_exactly_one_fragment(sizes: list[int], num_fragments: int) -> None:
    plan = plan_sizes(sizes, min(num_fragments, len(sizes)))
    assert sorted(slot.size for fragment in plan for slot in fragment.slots) == sorted(sizes)
    assert all(fragment.slots for fragment in plan)


@given(st.lists(st.integers(1, 50), min_size=3, max_size=6))
@settings(max_examples=50, deadline=None)
def test_the_largest_fragment_is_within_four_thirds_of_the_best(sizes: list[int]) -> None:
    best = min(
        max(sum(compress(sizes, (bin == number for bin in bins))) for number in range(3))
        for bins in product(range(3), repeat=len(sizes))
    )
    assert max(fragment.size for fragment in plan_sizes(sizes, 3)) <= best * 4 / 3


def plan_sizes(sizes: list[int], num_fragments: int) -> tuple[Fragment, ...]:
    return plan_fragments({f"t{i}": (size,) for i, size in enumerate(sizes)}, num_fragments, [])
