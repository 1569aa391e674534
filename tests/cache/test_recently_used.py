"""A bounded cache."""

from __future__ import annotations

from aengine.cache.recently_used import RecentlyUsed


def test_what_was_not_used_for_long_is_dropped() -> None:
    cache: RecentlyUsed[str, int] = RecentlyUsed(10)
    for name in ("a", "b", "c"):
        cache.put(name, ord(name), 3)
    assert cache.get("a") == 97  # now `b` is the oldest
    cache.put("d", 100, 4)
    assert [cache.get(name) for name in "abcd"] == [97, None, 99, 100]
    cache.put("e", 101, 50)  # larger than all
    assert [cache.get(name) for name in "acde"] == [None, None, None, 101]
    cache.put("f", 102, 1)
    assert (cache.get("e"), cache.get("f")) == (None, 102)
    cache.clear()
    cache.put("g", 103, 10)
    assert (cache.get("f"), cache.get("g")) == (None, 103)
