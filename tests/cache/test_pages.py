"""The page allocator."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aengine.cache.pages import OutOfPages, PageAllocator


def test_page_0_is_never_handed_out() -> None:
    allocator = PageAllocator(8)
    assert allocator.free == 7
    assert sorted(allocator.take(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.free == 0


def test_a_fresh_pool_hands_out_neighbouring_pages_in_order() -> None:
    allocator = PageAllocator(8)
    assert allocator.take(3) == [1, 2, 3]
    assert allocator.take(2) == [4, 5]


def test_taking_more_than_is_free_takes_nothing() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 free"):
        allocator.take(4)
    assert allocator.free == 3


def test_taking_no_pages_is_fine_even_when_none_are_free() -> None:
    allocator = PageAllocator(2)
    allocator.take(1)
    assert allocator.take(0) == []


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take -1"):
        PageAllocator(4).take(-1)


def test_a_page_comes_back_with_its_release() -> None:
    allocator = PageAllocator(2)
    [page] = allocator.take(1)
    assert (allocator.free, allocator.held(page)) == (0, True)
    allocator.release(page)
    assert (allocator.free, allocator.held(page)) == (1, False)


@pytest.mark.parametrize("page", [0, 1])
def test_a_free_page_cannot_be_released(page: int) -> None:
    allocator = PageAllocator(3)
    with pytest.raises(ValueError, match=f"page {page} is not held"):
        allocator.release(page)
    allocator.check_integrity()


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PageAllocator(1)


def test_check_integrity_sees_a_lost_page() -> None:
    allocator = PageAllocator(4)
    allocator._free.pop()
    with pytest.raises(AssertionError, match="page 1 is not held, nor free"):
        allocator.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """Random owners over a small pool, against a plain set."""

    NUM_PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES)
        self.held: set[int] = set()

    @rule(n=st.integers(0, 6))
    def take(self, n: int) -> None:
        if n > self.NUM_PAGES - 1 - len(self.held):
            with pytest.raises(OutOfPages):
                self.allocator.take(n)
            return
        pages = self.allocator.take(n)
        assert len(set(pages)) == n
        assert self.held.isdisjoint(pages), "a held page was handed out"
        assert all(0 < page < self.NUM_PAGES for page in pages)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.release(page)
        self.held.remove(page)

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def release_what_nobody_holds(self, page: int) -> None:
        if page not in self.held:
            with pytest.raises(ValueError):
                self.allocator.release(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.free == self.NUM_PAGES - 1 - len(self.held)
        assert {page for page in range(self.NUM_PAGES) if self.allocator.held(page)} == self.held


TestAllocatorAgainstAModel = AllocatorMachine.TestCase
TestAllocatorAgainstAModel.settings = settings(stateful_step_count=60)
