"""Numbers that stand for images in the prefix cache."""

from __future__ import annotations

from aengine.cache.image_keys import FIRST_KEY, ImageKeys, ids_before_images
from aengine.cache.radix import packed


def test_an_image_keeps_its_number_while_it_is_known() -> None:
    keys = ImageKeys(most=2)
    one, two = keys.key(b"one"), keys.key(b"two")
    assert FIRST_KEY <= one != two >= FIRST_KEY
    assert (keys.key(b"one"), keys.key(b"two")) == (one, two)
    three = keys.key(b"three")  # now the oldest, `one`, is not known any more
    assert keys.key(b"two") == two
    again = keys.key(b"one")
    assert len({one, two, three, again}) == 4
    keys.forget()
    assert keys.key(b"two") not in (one, two, three, again)


def test_numbers_are_found_among_ids() -> None:
    assert ids_before_images(b"") == 0
    assert ids_before_images(packed([0, 127, 128, 2**24 - 1]).tobytes()) == 4
    assert ids_before_images(packed([5, FIRST_KEY, 7, FIRST_KEY]).tobytes()) == 1
    assert ids_before_images(packed([2**32 - 1]).tobytes()) == 0
