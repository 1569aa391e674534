"""The KV pool's tensors."""

from __future__ import annotations

import torch

from aengine.cache.kv import KVLayer, KVPool, KVShape

SHAPE = KVShape((KVLayer(2, 8), KVLayer(1, 32, vectors=1), KVLayer(2, 8)), page_size=4, dtype=torch.bfloat16)


def pool() -> KVPool:
    return KVPool(SHAPE, 6, torch.device("cpu"))


def test_layers_are_views_of_one_zeroed_allocation() -> None:
    kv = pool()
    for i, shape in enumerate([(6, 4, 2, 8), (6, 4, 1, 32), (6, 4, 2, 8)]):
        keys, values = kv.layer(i)
        assert keys.shape == values.shape == shape
        assert not keys.any()
        assert not values.any()
        assert keys.is_contiguous()
        assert keys.untyped_storage().data_ptr() == kv.data.untyped_storage().data_ptr()


def test_what_is_written_into_one_is_in_no_other() -> None:
    kv = pool()
    for number, kept in enumerate(kept for i in range(3) for kept in kv.layer(i)):
        kept.fill_(number + 1)
    numbers = [kept.unique().tolist() for i in range(3) for kept in kv.layer(i)]
    assert numbers == [[1], [2], [4], [4], [5], [6]]  # the layer in the middle has one vector for keys and values
    assert kv.data.all()


def test_the_bytes_of_a_page_times_pages_is_the_allocation() -> None:
    kv = pool()
    assert SHAPE.page_bytes * 6 == kv.data.nbytes


def test_copy_pages_copies_k_and_v_of_all_layers_and_touches_nothing_else() -> None:
    kv = pool()
    kv.data.copy_(torch.randn(kv.data.shape))
    before = [kept.clone() for i in range(3) for kept in kv.layer(i)]
    kv.copy_pages(torch.tensor([1, 1, 4]), torch.tensor([2, 5, 3]))
    for was, now in zip(before, (kept for i in range(3) for kept in kv.layer(i)), strict=True):
        for source, destination in ((1, 2), (1, 5), (4, 3)):
            assert torch.equal(now[destination], was[source])
        for untouched in (0, 1, 4):
            assert torch.equal(now[untouched], was[untouched])
