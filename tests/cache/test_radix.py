"""The radix tree, by example."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Node, RadixTree

PAGE = 4


class Cache:
    """A tree and its allocator, with the two operations of most examples."""

    def __init__(self, num_pages: int = 100, page_size: int = PAGE) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(self.allocator, page_size)

    def add(self, ids: list[int], salt: str | None = None) -> tuple[list[int], Node]:
        """Cache a run of private pages. Release the pages that the tree does not take."""
        pages = self.allocator.take(len(ids) // self.tree.page_size)
        node, taken = self.tree.insert(ids, pages, salt)
        for page, tree_has_it in zip(pages, taken):
            if not tree_has_it:
                self.allocator.release(page)
        self.check()
        return pages, node

    def cached(self, ids: list[int], salt: str | None = None) -> list[int]:
        pages, _ = self.tree.match(ids, salt)
        self.check()
        return pages

    def check(self) -> None:
        self.tree.check_integrity()
        self.allocator.check_integrity()


def run(*pages: int) -> list[int]:
    """Return the token ids of whole pages. Each page is named by a number."""
    return [1000 * page + i for page in pages for i in range(PAGE)]


# ---- matching ---------------------------------------------------------------------------------------------


def test_a_shared_prefix_of_97_tokens_matches_96_at_page_size_16() -> None:
    cache = Cache(page_size=16)
    shared = list(range(97))
    pages, _ = cache.add([*shared, 7, 7, 7, 7, 7])
    matched = cache.cached([*shared, 8, 8, 8, 8, 8])
    assert matched == pages[:6]
    assert len(matched) * 16 == 96


def test_an_empty_tree_matches_nothing_and_its_root_can_be_locked() -> None:
    cache = Cache()
    pages, node = cache.tree.match(run(1), None)
    assert (pages, node) == ([], cache.tree.root)
    cache.tree.lock(node)
    cache.tree.unlock(node)
    cache.check()


def test_only_whole_pages_match() -> None:
    cache = Cache()
    pages, _ = cache.add(run(1, 2))
    assert cache.cached(run(1, 2)[:-1]) == pages[:1]
    assert cache.cached(run(1)[:-1]) == []


def test_ids_beyond_the_last_page_are_ignored() -> None:
    cache = Cache()
    pages = cache.allocator.take(1)
    assert cache.tree.insert(run(1, 2)[:6], pages, None).taken == [True]
    assert cache.cached(run(1, 2)) == pages


def test_tuples_and_lists_of_ids_are_the_same_run() -> None:
    cache = Cache()
    pages, _ = cache.add(run(1, 2))
    assert cache.tree.match(tuple(run(1, 2)), None).pages == pages


def test_a_match_inside_a_run_ends_exactly_at_its_node() -> None:
    cache = Cache()
    pages, node = cache.add(run(1, 2, 3))
    matched = cache.tree.match(run(1, 2, 9), None)
    assert matched.pages == pages[:2]
    assert matched.node.depth == 2
    assert node.parent is matched.node, "the existing node stays the deeper half"
    assert node.depth == 3
    cache.check()


# ---- salts ------------------------------------------------------------------------------------------------


def test_salts_isolate() -> None:
    cache = Cache()
    plain, _ = cache.add(run(1, 2))
    salted, _ = cache.add(run(1, 2), "tenant")
    assert cache.cached(run(1, 2)) == plain
    assert cache.cached(run(1, 2), "tenant") == salted
    assert cache.cached(run(1, 2), "other") == []
    assert cache.cached(run(1, 2), "") == []
    assert cache.tree.cached_pages == 4


def test_nothing_of_a_salt_is_left_once_its_pages_are_gone() -> None:
    cache = Cache()
    for i in range(50):
        cache.add(run(1), f"tenant {i}")
        cache.tree.clear()
    assert cache.tree.root.children == {}


# ---- inserting --------------------------------------------------------------------------------------------


def test_a_new_run_takes_the_pages_over() -> None:
    cache = Cache()
    pages, node = cache.add(run(1, 2))
    assert node.depth == 2
    assert all(map(cache.allocator.held, pages))
    assert cache.tree.cached_pages == cache.tree.evictable_pages == 2


def test_where_the_tree_has_another_page_the_caller_keeps_its_copy() -> None:
    cache = Cache()
    first, node = cache.add(run(1, 2))
    mine = cache.allocator.take(3)
    inserted = cache.tree.insert(run(1, 2, 3), mine, None)
    assert inserted.taken == [False, False, True]
    assert inserted.node.parent is node
    assert all(map(cache.allocator.held, mine))
    assert cache.cached(run(1, 2, 3)) == [*first, mine[2]]


def test_a_run_may_begin_where_a_locked_one_ends() -> None:
    """A prompt in chunks: the tree already owns the locked part."""
    cache = Cache()
    first, _ = cache.add(run(1, 2))
    matched = cache.tree.match(run(1, 2, 3, 4), None)
    cache.tree.lock(matched.node)
    pages = cache.allocator.take(2)

    one = cache.tree.insert(run(3), pages[:1], None, matched.node)
    cache.tree.lock(one.node)
    cache.tree.unlock(matched.node)
    two = cache.tree.insert(run(4), pages[1:], None, one.node)

    assert (one.taken, two.taken) == ([True], [True])
    assert (one.node.depth, two.node.depth) == (3, 4)
    assert cache.cached(run(1, 2, 3, 4)) == first + pages


def test_after_a_locked_node_the_caller_keeps_copies_of_cached_pages() -> None:
    cache = Cache()
    theirs, _ = cache.add(run(1, 2, 3))
    node = cache.tree.match(run(1), None).node
    cache.tree.lock(node)
    mine = cache.allocator.take(3)
    inserted = cache.tree.insert(run(2, 3, 4), mine, None, node)
    assert inserted.taken == [False, False, True]
    assert cache.cached(run(1, 2, 3, 4)) == [*theirs, mine[2]]


def test_the_node_that_a_run_follows_survives_a_split_above_it() -> None:
    cache = Cache()
    pages, node = cache.add(run(1, 2, 3))
    cache.tree.lock(node)
    cache.add(run(1, 9))
    more = cache.allocator.take(1)
    inserted = cache.tree.insert(run(4), more, None, node)
    assert inserted.node.parent is node
    assert cache.cached(run(1, 2, 3, 4)) == pages + more


def test_nothing_follows_a_node_that_was_evicted() -> None:
    cache = Cache()
    _, node = cache.add(run(1))
    cache.tree.evict(1)
    with pytest.raises(ValueError, match="no longer in the tree"):
        cache.tree.insert(run(2), cache.allocator.take(1), None, node)


def test_inserting_nothing_gives_the_root() -> None:
    cache = Cache()
    assert cache.tree.insert([1, 2, 3], [], None) == (cache.tree.root, [])


def test_too_few_ids_are_refused() -> None:
    cache = Cache()
    with pytest.raises(ValueError, match="2 pages need 8 ids, got 7"):
        cache.tree.insert(run(1, 2)[:7], cache.allocator.take(2), None)


# ---- splitting --------------------------------------------------------------------------------------------


def test_divergence_splits_a_run_and_re_parents_its_children() -> None:
    cache = Cache()
    _, parent = cache.add(run(1, 2, 3))
    _, child = cache.add(run(1, 2, 3, 4))
    _, sibling = cache.add(run(1, 2, 8))
    assert child.parent is parent
    assert sibling.parent is parent.parent
    upper = parent.parent
    assert upper is not None
    assert (upper.depth, parent.depth, child.depth) == (2, 3, 4)
    assert cache.tree.cached_pages == 5


def test_a_split_keeps_locks_on_both_halves() -> None:
    cache = Cache()
    _, node = cache.add(run(1, 2, 3))
    cache.tree.lock(node)
    cache.tree.lock(node)
    _, other = cache.add(run(1, 9))
    upper = node.parent
    assert upper is not None
    assert (upper.locks, node.locks, other.locks) == (2, 2, 0)
    cache.tree.unlock(node)
    assert (upper.locks, node.locks) == (1, 1)
    cache.tree.unlock(node)
    assert cache.tree.evictable_pages == 4
    cache.check()


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
