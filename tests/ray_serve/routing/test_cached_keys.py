"""The keys that a replica reports are those in its radix tree, whenever a router asks."""

from __future__ import annotations

from random import Random

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import RadixTree
from aengine.ray_serve.routing import cached_keys
from aengine.ray_serve.routing.cached_keys import CachedKeys, Changes
from aengine.ray_serve.routing.prompt import prompt_from_ids

PAGE = 16


def follow(known: set[int], changes: Changes) -> set[int]:
    return (set() if changes.restart else known) - set(changes.evicted) | set(changes.stored)


def test_routers_know_the_keys_in_the_tree_at_any_time() -> None:
    rng, allocator = Random(0), PageAllocator(101)
    tree, keys = RadixTree(allocator, PAGE), CachedKeys(PAGE)
    tree.watchers.append(keys)
    prompts, knows = [], {"often": set[int](), "seldom": set[int]()}
    for number in range(300):
        old = rng.choice(prompts)[: rng.randrange(8, 160)] if prompts and rng.random() < 0.6 else []
        ids = old + [rng.randrange(1000) for _ in range(rng.randrange(20, 200))]
        prompts.append(ids)
        matched = tree.match(ids)
        tree.lock(matched.node)
        needed = len(ids) // PAGE - len(matched.pages)
        tree.evict(needed - allocator.free)
        tree.insert(ids, matched.pages + allocator.take(needed))
        tree.unlock(matched.node)
        keys.note(prompt_from_ids(ids), len(ids), tree.match(ids).pages)
        if number == 150:
            tree.clear()
        knows["often"] = follow(knows["often"], keys.changes("often"))
        if rng.random() < 0.05:
            knows["seldom"] = follow(knows["seldom"], keys.changes("seldom"))
        cached = set()
        for sent in prompts:
            prompt, pages = prompt_from_ids(sent), len(tree.match(sent).pages)
            cached |= {key for key, end in zip(prompt.keys, prompt.ends) if end <= pages * PAGE}
        assert knows["often"] == cached & knows["often"]  # no key that is not cached
        assert len(knows["often"]) == len(keys)
    knows["seldom"] = follow(knows["seldom"], keys.changes("seldom"))
    assert knows["seldom"] == knows["often"]
    tree.check_integrity()


def test_a_router_that_missed_changes_restarts() -> None:
    keys = CachedKeys(PAGE)
    assert keys.changes("one") == Changes()
    many = len(prompt_from_ids([0] * 1600).keys)
    for number in range(cached_keys._LOG // many):  # twice as many changes as the log keeps
        keys.note(prompt_from_ids([number] * 1600), 1600, range(100))
        keys.removed(range(100))
    changes = keys.changes("one")
    assert changes.restart
    assert changes.stored == ()
    assert not keys.changes("one").restart


def test_estimated_lengths_are_scaled_to_the_true_one() -> None:
    keys = CachedKeys(PAGE)
    prompt = prompt_from_ids(range(320))  # an estimate: the prompt really has 160 tokens
    keys.note(prompt, 160, range(5))  # of which 80 are cached
    assert set(keys.changes("one").stored) == {key for key, end in zip(prompt.keys, prompt.ends) if end <= 160}


def test_texts_that_are_the_same_tokens_take_no_more_memory_the_more_of_them_there_are() -> None:
    """A page that all requests use is never evicted, but each request may write the same tokens in other bytes."""
    keys, knows = CachedKeys(PAGE), set[int]()
    prompts = [prompt_from_ids([number] * 400) for number in range(500)]
    for number, prompt in enumerate(prompts):
        keys.note(prompt, 400, range(25))
        if number % 50 == 49:
            knows = follow(knows, keys.changes("one"))
            assert len(knows) == len(keys) <= 32 * 25
    assert set(prompts[-1].keys) <= knows  # the newest stay
    keys.removed(range(25))
    assert follow(knows, keys.changes("one")) == set()
    assert len(keys) == 0
