"""Lesson 3: pages. The cache is divided into pages of a few tokens. A sequence owns a list of pages, in any order.

A sequence gets memory as it grows. No memory is reserved for its greatest possible length.

Read: aengine/cache/pages.py.
"""

from __future__ import annotations

import pytest

from aengine.cache.pages import OutOfPages, PageAllocator
from aengine.model.decoder import Decoder
from tests.lessons.conftest import NEW_TOKENS, Reference
from tests.lessons.paper import feed, pool_for


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_scattered_pages_give_the_reference(decoder: Decoder, reference: Reference, page_size: int) -> None:
    kv = pool_for(decoder, num_pages=100, page_size=page_size)
    kv.data.fill_(float("nan"))  # the data of a former owner must not matter
    allocator = PageAllocator(100)
    strangers = allocator.take(30)
    for page in strangers[::2]:  # a free list with holes: the next pages are far apart
        allocator.release(page)

    pages: list[int] = []

    def grow(tokens: int) -> None:
        while len(pages) * page_size < tokens:
            pages.extend(allocator.take(1))

    length = len(reference.prompt_ids)
    grow(length)
    output = [int(feed(decoder, kv, pages, 0, reference.prompt_ids).argmax())]
    while len(output) < NEW_TOKENS:
        grow(length + 1)
        output.append(int(feed(decoder, kv, pages, length, output[-1:]).argmax()))
        length += 1
    assert output == reference.output_ids
    assert len(pages) == -(-length // page_size)  # not one page more than the tokens fill
    assert 0 not in pages


def test_an_empty_pool_says_so() -> None:
    allocator = PageAllocator(3)  # page 0 is reserved
    allocator.take(2)
    with pytest.raises(OutOfPages):
        allocator.take(1)
