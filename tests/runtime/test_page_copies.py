"""Pages go to host memory and come back to other pages as they were; every other page stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from aengine.cache.kv import KVLayer, KVPool, KVShape
from aengine.runtime.page_copies import Copier, HostCopier, PageCopies

PAGES, SLOTS = 24, 10
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def pool(device: str, dtype: torch.dtype, seed: int) -> KVPool:
    """A pool full of noise."""
    layers = KVLayer(2, 8), KVLayer(1, 4), KVLayer(2, 8)
    kv = KVPool(KVShape(layers, 4, dtype), PAGES, torch.device(device))
    kv.data.view(torch.uint8).copy_(
        torch.randint(0, 256, kv.data.view(torch.uint8).shape, generator=torch.Generator().manual_seed(seed))
    )
    return kv


def pages_of(kv: KVPool) -> torch.Tensor:
    """A copy: [pages, bytes]."""
    return torch.cat([kind.cpu().flatten(1) for kind in kv.by_page()], dim=1)


def copier(kv: KVPool) -> Copier:
    if kv.data.device.type == "cpu":
        return HostCopier(kv, SLOTS)
    from aengine.runtime.cuda.page_copies import DeviceCopier, PinnedMemory

    return DeviceCopier(kv, PinnedMemory(SLOTS * kv.page_bytes), SLOTS)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def pools(request: pytest.FixtureRequest, device: str) -> list[KVPool]:
    """Of two ranks."""
    return [pool(device, request.param, rank) for rank in range(2)]


@pytest.fixture
def copies(pools: list[KVPool]) -> Iterator[PageCopies]:
    made = PageCopies([copier(kv) for kv in pools])
    yield made
    made.close()


def test_pages_come_back_as_they_were(pools: list[KVPool], copies: PageCopies) -> None:
    before = [pages_of(kv) for kv in pools]
    gone, slots, back = [3, 17, 4, 9, 1], [9, 0, 1, 5, 4], [20, 2, 21, 8, 7]

    copies.copy_to_host(gone, slots)
    for kv in pools:
        for kind in kv.by_page():
            kind[gone] = 0
    copies.copy_to_device(slots, back)

    for kv, was in zip(pools, before, strict=True):
        now = pages_of(kv)
        for page in range(PAGES):
            source = gone[back.index(page)] if page in back else page
            wanted = torch.zeros_like(was[page]) if page in gone else was[source]
            assert torch.equal(now[page], wanted), page


def test_a_slot_is_its_page_rank_by_rank(pools: list[KVPool], copies: PageCopies) -> None:
    copies.copy_to_host([6], [2])

    parts = copies.memory(2)

    assert copies.page_bytes == sum(map(len, parts)) == sum(kv.page_bytes for kv in pools)
    for kv, part in zip(pools, parts, strict=True):
        assert bytes(part) == pages_of(kv)[6].numpy().tobytes()


def test_what_is_written_into_a_slot_comes_to_the_device(pools: list[KVPool], copies: PageCopies) -> None:
    for rank, part in enumerate(copies.memory(7)):
        part[:] = bytes([rank + 1]) * len(part)

    copies.copy_to_device([7], [12])

    for rank, kv in enumerate(pools):
        assert (pages_of(kv)[12] == rank + 1).all()


@pytest.mark.gpu
def test_rows_too_far_apart_for_one_copy_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from aengine.runtime.cuda import page_copies

    kv = pool("cuda", torch.bfloat16, 0)
    monkeypatch.setattr(page_copies, "_MAX_PITCH", kv.by_page()[0].stride(1) - 1)
    before = pages_of(kv)
    copies = PageCopies([copier(kv)])
    copies.copy_to_host([3, 5], [1, 0])
    copies.copy_to_device([1, 0], [6, 7])
    copies.close()
    assert torch.equal(pages_of(kv)[[6, 7]], before[[3, 5]])


def test_host_memory_is_pinned_from_the_device_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has the first device as its current one: to pin from there would open a context on it."""
    from aengine.runtime.cuda import page_copies

    current: list[torch.device | None] = [None]

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(page_copies, "PinnedMemory", lambda nbytes: (nbytes, current[-1]))
    devices = [torch.device("cuda", 2), torch.device("cuda", 3)]
    with page_copies.pin_in_thread(64, devices) as pinned:
        assert pinned() == [(64, one) for one in devices]


@pytest.mark.gpu
def test_copies_go_on_beside_steps() -> None:
    """A kernel that runs for long does not hold them up: no stream waits for another."""
    kv = pool("cuda", torch.bfloat16, 0)
    copies = PageCopies([copier(kv)])
    torch.cuda._sleep(2_000_000_000)  # about a second
    ended = torch.cuda.Event()
    ended.record()
    copies.copy_to_host([1, 2], [1, 2])
    copies.copy_to_device([1, 2], [3, 4])
    assert not ended.query()
    copies.close()


def test_memory_is_freed_although_the_device_is_lost() -> None:
    from aengine.runtime.cuda.page_copies import DeviceCopier

    made = DeviceCopier.__new__(DeviceCopier)  # the rest of one takes a GPU
    made._device = torch.device("cuda", 0)
    made._down = made._up = Mock(synchronize=Mock(side_effect=RuntimeError("the device is lost")))
    made._memory = memory = Mock()
    with pytest.raises((RuntimeError, AttributeError, AssertionError)):  # without a GPU torch raises too
        made.close()
    memory.close.assert_called_once()
