"""Memory for images: what is kept of them, and the pinned memory from which their pixels are copied."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.runtime.step import image_memory
from aengine.runtime.step.image_memory import KeptEmbeddings, PixelUploads

CPU = torch.device("cpu")


def test_new_embeddings_replace_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_memory, "KEPT_BYTES", 0)
    rng, kept = random.Random(3), KeptEmbeddings(20, 2, torch.float32, CPU)
    put: dict[int, torch.Tensor] = {}
    for key in range(300):
        put[key] = torch.rand(rng.randint(1, 20), 2)
        kept.put(key, put[key])
        known = [one for one in put if one in kept]
        assert key in known
        assert sum(len(put[one]) for one in known) <= 20
        for one in known:
            assert torch.equal(kept.get(one), put[one])
    kept.clear()
    assert key not in kept


def test_more_embeddings_than_the_buffer_holds_are_not_kept() -> None:
    kept = KeptEmbeddings(20, 2**26, torch.float32, torch.device("meta"))  # the largest image exceeds KEPT_BYTES
    kept.put(1, torch.empty(21, 2**26, device="meta"))
    assert 1 not in kept
    kept.put(2, torch.empty(20, 2**26, device="meta"))
    assert 2 in kept


def test_pixels_of_two_steps_are_at_different_places() -> None:
    uploads = PixelUploads(0, CPU)
    uploads._pinned = torch.zeros(2, 10, dtype=torch.uint8)  # as on a device
    assert uploads.upload(b"1234", 7).tolist() == [*b"1234"]
    assert uploads.upload(b"5678", 7).tolist() == [*b"5678"]
    assert uploads.upload(b"abc", 7).tolist() == [*b"abc"]  # no place is left
    assert uploads.upload(b"90", 8).tolist() == [*b"90"]
    assert bytes(uploads._pinned[1].tolist()) == b"12345678\0\0"
    assert bytes(uploads._pinned[0].tolist()) == b"90" + bytes(8)
    uploads.upload(b"x" * 10, 9)
    assert bytes(uploads._pinned[1].tolist()) == b"x" * 10
