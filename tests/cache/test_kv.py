"""The KV pool's tensors."""

from __future__ import annotations

import torch

from aengine.cache.kv import KVPool, KVShape

SHAPE = KVShape(num_layers=3, page_size=4, kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def pool() -> KVPool:
    return KVPool(SHAPE, 6, torch.device("cpu"))


def test_layers_are_views_of_one_zeroed_allocation() -> None:
    kv = pool()
    for i in range(3):
        keys, values = kv.layer(i)
        assert keys.shape == values.shape == (6, 4, 2, 8)
        assert not keys.any()
        assert not values.any()
        assert keys.is_contiguous()
        assert keys.untyped_storage().data_ptr() == kv.data.untyped_storage().data_ptr()
    kv.layer(1)[1][5] = 1
    assert kv.data[1, 1, 5].all()
    assert kv.data.sum() == 4 * 2 * 8


def test_the_bytes_of_a_page_times_pages_is_the_allocation() -> None:
    kv = pool()
    assert SHAPE.page_bytes * 6 == kv.data.nbytes


def test_copy_pages_copies_k_and_v_of_all_layers_and_touches_nothing_else() -> None:
    kv = pool()
    kv.data.copy_(torch.randn(kv.data.shape))
    before = kv.data.clone()
    kv.copy_pages(torch.tensor([1, 1, 4]), torch.tensor([2, 5, 3]))
    for source, destination in ((1, 2), (1, 5), (4, 3)):
        assert torch.equal(kv.data[:, :, destination], before[:, :, source])
    for untouched in (0, 1, 4):
        assert torch.equal(kv.data[:, :, untouched], before[:, :, untouched])
