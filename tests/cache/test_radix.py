"""The radix tree, by example."""

from __future__ import annotations

import pytest

from tests.cache.small_tree import Cache, run

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
