import gc
import weakref

import torch
from rollout_builders import small_model

from p2pdiloco.rollout.cache import Cache
from p2pdiloco.rollout.prefixes import BLOCK_TOKENS, PrefixTree
from p2pdiloco.rollout.rows import Rows


def marked(start: int, end: int) -> torch.Tensor:
    return torch.arange(start, end).float().expand(1, 2, 1, -1)


def small_cache(num_slots: int) -> Cache:
    model = small_model()
    return Cache(model, num_slots * Rows(model).slot_bytes)


def test_a_prefix_is_found_up_to_the_block_where_it_ends() -> None:
    tree = PrefixTree()
    tree.insert(range(40), marked)
    assert tree.num_slots == 32
    assert tree.num_matched([*range(20), 99]) == BLOCK_TOKENS
    assert torch.cat(tree.match(range(33)), dim=3)[0, 0, 0].tolist() == list(range(32))
    assert tree.match([5, *range(40)]) == []


def test_what_is_forgotten_is_freed_without_the_garbage_collector() -> None:
    tree, blocks = PrefixTree(), list[weakref.ref[torch.Tensor]]()

    def watched(start: int, end: int) -> torch.Tensor:
        block = marked(start, end)
        blocks.append(weakref.ref(block))
        return block

    tree.insert(range(64), watched)
    gc.disable()
    try:
        tree.clear()
        assert [block() for block in blocks] == [None] * 4
    finally:
        gc.enable()


def test_texts_that_begin_alike_share_blocks() -> None:
    tree = PrefixTree()
    tree.insert([*range(32), *[1] * 16], marked)
    tree.insert([*range(32), *[2] * 16], marked)
    assert tree.num_slots == 64


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = PrefixTree()
    old, new = [*range(16), *[1] * 16], [*range(16), *[2] * 16]
    tree.insert(old, marked)
    tree.insert(new, marked)
    tree.match(old)
    tree.evict(1)
    assert (tree.num_matched(old), tree.num_matched(new)) == (32, 16)
    tree.evict(10_000)
    assert tree.num_slots == 0
    assert tree.num_matched(old) == 0


def test_resizing_keeps_what_fits() -> None:
    rows = Rows(small_model())
    rows.resize(2, 64)
    rows.layers[1][0][1, :, :3] = 5.0
    rows.resize(4, 128)
    assert rows.layers[1][0][1, :, :3].eq(5.0).all()
    assert rows.layers[1][0].sum() == 5.0 * 2 * 3 * 12
    assert rows.num_slots == 4 * 128


def test_slots_that_were_stored_can_be_loaded_elsewhere() -> None:
    rows = Rows(small_model())
    rows.resize(2, 64)
    for keys, values in rows.layers:
        keys[0, :, :20] = torch.randn(2, 20, 12)
        values[0, :, :20] = torch.randn(2, 20, 12)
    rows.load(1, torch.cat([rows.stored(0, 0, 16), rows.stored(0, 16, 20)], dim=3))
    for keys, values in rows.layers:
        assert torch.equal(keys[0], keys[1])
        assert torch.equal(values[0], values[1])


def test_admission_waits_for_memory() -> None:
    cache = small_cache(256)
    assert not cache.could_admit(257)
    assert cache.admit(range(5), 100) == 0
    assert cache.admit(range(5), 100) == 0
    assert cache.admit(range(5), 100) is None
    cache.release(0, num_held_by_last=5)
    assert cache.admit(range(5), 100) == 0


def test_one_long_sequence_makes_all_rows_long() -> None:
    cache = small_cache(256)
    assert cache.admit(range(5), 60) == 0
    assert cache.admit(range(5), 129) is None
    assert cache.admit(range(5), 128) == 0


def test_prefixes_give_way_to_running_sequences() -> None:
    cache = small_cache(256)
    cache.admit(range(64), 64)
    cache.keep(0, range(64))
    cache.release(0, num_held_by_last=64)
    assert cache.prefixes.num_slots == 64
    assert cache.admit(range(64), 200) == 48
    assert cache.prefixes.num_slots == 0
    assert cache.num_slots <= 256


def test_the_last_row_fills_the_gap() -> None:
    cache = small_cache(1024)
    for _ in range(3):
        cache.admit(range(4), 64)
    cache.rows.layers[0][0][2, :, :4] = 7.0
    cache.release(0, num_held_by_last=4)
    assert cache.rows.layers[0][0][0, :, :4].eq(7.0).all()
