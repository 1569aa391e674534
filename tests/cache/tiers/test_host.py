"""Slots of host memory: the least recently used page is evicted, but not while it is read."""

from __future__ import annotations

from aengine.cache.tiers.host import HostPage, HostPages
from aengine.cache.tiers.keys import page_keys, root_key
from aengine.cache.tiers.speeds import Speeds

A, B, C = b"a", b"b", b"c"


def filled(*keys: bytes, slots: int = 2) -> HostPages:
    host = HostPages(slots)
    for key in keys:
        (slot,) = host.take(1)
        host.put(key, slot)
    return host


def page(host: HostPages, key: bytes) -> HostPage:
    found = host.get(key)
    assert found is not None
    return found


def test_the_least_recently_used_page_makes_room() -> None:
    host = filled(A, B)
    host.touch(A)
    (slot,) = host.take(1)
    host.put(C, slot)
    assert [key in host for key in (A, B, C)] == [True, False, True]
    host.check_integrity()


def test_a_page_that_is_read_keeps_its_slot() -> None:
    host = filled(A, B)
    first = page(host, A)
    host.pin(first)
    host.pin(page(host, B))
    assert host.take(1) == []
    host.clear()
    assert A not in host
    assert host.take(2) == []
    host.check_integrity()
    host.unpin(first)
    assert host.take(2) == [first.slot]
    host.check_integrity()


def test_a_page_that_is_there_already_is_kept() -> None:
    host = filled(A, slots=3)
    before = page(host, A).slot
    (slot,) = host.take(1)
    host.put(A, slot)
    assert page(host, A).slot == before
    assert len(host.take(3)) == 3
    host.check_integrity()


def test_keys_depend_on_every_token_before_the_salt_and_the_model() -> None:
    ids = bytes(range(32))

    def keys(model: bytes, salt: object, data: bytes) -> list[bytes]:
        return list(page_keys(root_key(model, salt), data, 8))

    plain = keys(b"model", None, ids)
    assert len(plain) == len(set(plain)) == 4
    assert keys(b"model", None, ids[:20]) == plain[:2]
    assert list(page_keys(plain[1], ids[16:], 8)) == plain[2:]
    for other in (keys(b"other", None, ids), keys(b"model", "None", ids), keys(b"model", None, b"x" + ids[1:])):
        assert not set(other) & set(plain)


def test_few_tokens_are_computed_and_many_are_brought() -> None:
    speeds = Speeds()
    speeds.add_compute(8192, 0.2)
    speeds.add_load(10**9, 0.02)
    size = 147_456
    assert not speeds.worth(64, 64 * size, 0, 0)
    assert speeds.worth(16384, 16384 * size, 0, 0)
    assert not speeds.worth(4096, 4096 * size, 0, 10**10)  # after other loads
    speeds.add_read(10**8, 0.1)
    assert not speeds.worth(16384, 16384 * size, 16384 * size, 0)


def test_short_steps_say_nothing_about_long_ones() -> None:
    speeds = Speeds()
    speeds.add_compute(3, 0.02)
    assert speeds.compute == 0
