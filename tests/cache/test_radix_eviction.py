"""Locks and evictions in the tree of cached prefixes, and its integrity check."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from tests.cache.small_tree import Cache, run

# ---- locks and eviction -----------------------------------------------------------------------------------


def test_a_locked_path_survives() -> None:
    cache = Cache()
    pages, _ = cache.add(run(1, 2, 3, 4))
    node = cache.tree.match(run(1, 2), None).node
    cache.tree.lock(node)
    assert cache.tree.evictable_pages == 2
    assert cache.tree.evict(100) == 2
    assert cache.cached(run(1, 2, 3, 4)) == pages[:2]
    cache.tree.unlock(node)
    assert cache.tree.evict(100) == 2
    assert cache.tree.cached_pages == 0
    cache.check()


def test_eviction_takes_the_least_recently_used_first() -> None:
    cache = Cache()
    for page in (1, 2, 3):
        cache.add(run(page))
    cache.cached(run(1))
    assert cache.tree.evict(1) == 1
    assert [len(cache.cached(run(page))) for page in (1, 2, 3)] == [1, 0, 1]
    cache.cached(run(3))
    cache.cached(run(1))
    assert cache.tree.evict(1) == 1
    assert [len(cache.cached(run(page))) for page in (1, 3)] == [1, 0]


def test_eviction_takes_leaves_before_their_parents() -> None:
    cache = Cache()
    cache.add(run(1, 2))
    cache.add(run(1, 2, 3, 4))
    cache.cached(run(1, 2))
    for left in (3, 2, 1, 0):
        assert cache.tree.evict(1) == 1
        assert len(cache.cached(run(1, 2, 3, 4))) == left


def test_a_prefix_used_by_many_outlives_its_branches() -> None:
    cache = Cache()
    for branch in (2, 3, 4):
        cache.add(run(1, branch))
    cache.tree.evict(3)
    assert len(cache.cached(run(1))) == 1
    assert cache.tree.cached_pages == 1


def test_the_time_under_a_lock_counts_as_use() -> None:
    cache = Cache()
    _, node = cache.add(run(1))
    cache.tree.lock(node)
    cache.add(run(2))
    cache.tree.unlock(node)
    cache.tree.evict(1)
    assert len(cache.cached(run(1))) == 1
    assert len(cache.cached(run(2))) == 0


def test_only_the_tail_that_is_needed_is_cut() -> None:
    cache = Cache()
    pages, node = cache.add(run(1, 2, 3, 4, 5))
    assert cache.tree.evict(2) == 2
    assert node.depth == 3
    assert cache.cached(run(1, 2, 3, 4, 5)) == pages[:3]
    cache.add(run(1, 2, 3, 4))
    assert len(cache.cached(run(1, 2, 3, 4, 5))) == 4


def test_an_evicted_node_cannot_be_locked() -> None:
    cache = Cache()
    _, node = cache.add(run(1))
    cache.tree.evict(1)
    with pytest.raises(ValueError, match="no longer in the tree"):
        cache.tree.lock(node)


def test_unlocking_what_is_not_locked_is_refused() -> None:
    cache = Cache()
    _, node = cache.add(run(1))
    with pytest.raises(ValueError, match="not locked"):
        cache.tree.unlock(node)
    cache.check()


def test_clear_empties_the_tree_and_the_pool_is_whole_again() -> None:
    cache = Cache(num_pages=20)
    for branch in range(5):
        cache.add(run(1, 2, branch))
    cache.tree.clear()
    assert (cache.tree.cached_pages, cache.tree.evictable_pages, cache.allocator.free) == (0, 0, 19)
    cache.check()


def test_locked_nodes_of_a_cleared_tree_are_not_found_and_leave_when_unlocked() -> None:
    cache = Cache(num_pages=20)
    pages, _ = cache.add(run(1, 2, 3))
    node = cache.tree.match(run(1, 2), None).node
    cache.tree.lock(node)
    cache.tree.clear()
    cache.check()
    assert cache.cached(run(1, 2, 3)) == []
    assert (cache.tree.cached_pages, cache.tree.evictable_pages) == (2, 0)
    assert all(map(cache.allocator.held, pages[:2]))
    cache.tree.unlock(node)
    assert (cache.tree.cached_pages, cache.allocator.free) == (0, 19)
    cache.check()


def test_after_clearing_the_same_run_may_be_cached_again_next_to_its_locked_rest() -> None:
    cache = Cache(num_pages=20)
    _, old = cache.add(run(1, 2))
    cache.tree.lock(old)
    cache.tree.clear()
    pages, new = cache.add(run(1, 2))
    assert cache.cached(run(1, 2)) == pages
    cache.tree.unlock(old)
    assert cache.cached(run(1, 2)) == pages
    assert new.parent is cache.tree.root
    cache.check()


def test_nothing_follows_a_node_from_before_the_tree_was_cleared() -> None:
    cache = Cache()
    _, node = cache.add(run(1))
    cache.tree.lock(node)
    cache.tree.clear()
    with pytest.raises(ValueError, match="no longer in the tree"):
        cache.tree.insert(run(2), cache.allocator.take(1), None, node)


def test_evictions_alone_do_not_count_as_changes() -> None:
    """A lookup that found too little finds no more after them."""
    cache = Cache()
    _, node = cache.add(run(1, 2, 3))
    cache.add(run(4))
    before = cache.tree.changes
    cache.tree.evict(2)
    assert cache.tree.changes == before
    for change in (
        lambda: cache.tree.lock(node),
        lambda: cache.tree.unlock(node),
        lambda: cache.add(run(5)),
        cache.tree.clear,
    ):
        before = cache.tree.changes
        change()
        assert cache.tree.changes > before


class Counting(OrderedDict[Any, None]):
    """An eviction order that counts lookups."""

    looks = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.looks += 1
            yield item


def test_eviction_visits_what_it_evicts_and_never_walks_the_tree() -> None:
    cache = Cache(num_pages=20_100)
    leaves = 10_000
    for i in range(leaves):
        pages = cache.allocator.take(2)
        taken = cache.tree.insert(run(i % 100, 100 + i), pages, None).taken
        if not taken[0]:
            cache.allocator.release(pages[0])
    for i in range(0, leaves, 3):  # stale entries would have to be skipped
        cache.tree.match(run(i % 100, 100 + i), None)
    cache.tree._unlocked = counting = Counting(cache.tree._unlocked)
    assert cache.tree.evict(1) == 1
    assert counting.looks == 1
    assert cache.tree.evict(500) == 500
    assert counting.looks == 501
    cache.check()


# ---- check_integrity sees what it should ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache, node: setattr(cache.tree, "cached_pages", 9), "cached_pages is 9, the tree holds 3"),
        (lambda cache, node: setattr(cache.tree, "evictable_pages", 9), "evictable_pages is 9, counted 3"),
        (lambda cache, node: setattr(node, "locks", 1), "a parent has fewer locks"),
        (lambda cache, node: setattr(node, "locks", -1), "negative"),
        (lambda cache, node: setattr(node, "depth", 9), "depth"),
        (lambda cache, node: setattr(node, "parent", cache.tree.root), "disagree"),
        (lambda cache, node: setattr(node, "data", b"other ids" + node.data[9:]), "the key is not the run's"),
        (lambda cache, node: node.pages.append(50), "differ in length"),
        (lambda cache, node: node.pages.__setitem__(0, node.parent.pages[0]), "held twice"),
        (lambda cache, node: node.pages.__setitem__(0, 50), "page 50 is held but free"),
        (lambda cache, node: setattr(node, "epoch", 1), "the key is not the run's|another epoch"),
        (lambda cache, node: setattr(cache.tree, "epoch", 1), "of an old epoch is in the tree"),
        (lambda cache, node: cache.tree._unlocked.pop(node), "unlocked and not in the eviction order"),
        (lambda cache, node: cache.tree._unlocked.move_to_end(node), "evicted after its parent"),
        (lambda cache, node: node.parent.children.clear(), "names nodes that are not in the tree"),
    ],
)
def test_check_integrity_names_the_damage(damage: Any, message: str) -> None:
    cache = Cache()
    cache.add(run(1, 2))
    _, node = cache.add(run(1, 2, 3))
    damage(cache, node)
    with pytest.raises(AssertionError, match=message):
        cache.tree.check_integrity()
