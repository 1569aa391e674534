"""Addresses stay while memory comes and goes, and a device without room leaves all as it was; on a driver of lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.runtime.cuda.virtual_memory import Driver, VirtualMemory

UNIT = 2**21


class FakeDriver(Driver):
    """A device with a limited number of bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.reserved: dict[int, int] = {}  # sizes by address
        self.mapped: dict[int, int] = {}
        self._next = UNIT

    def granularity(self, device: int) -> int:
        return UNIT

    def reserve(self, size: int) -> int:
        assert size % UNIT == 0
        address, self._next = self._next, self._next + size
        self.reserved[address] = size
        return address

    def release_addresses(self, address: int, size: int) -> None:
        assert address not in self.mapped
        assert self.reserved.pop(address) == size

    def map(self, address: int, size: int, device: int) -> None:
        assert self.reserved[address] == size
        assert address not in self.mapped
        if sum(self.mapped.values()) + size > self.room:
            raise torch.OutOfMemoryError
        self.mapped[address] = size

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size


def test_blocks_are_whole_units_with_memory_behind_them() -> None:
    driver = FakeDriver(10 * UNIT)
    memory = VirtualMemory(driver)
    first, second = memory.allocate(1, 0), memory.allocate(UNIT + 1, 0)
    assert driver.mapped == {first: UNIT, second: 2 * UNIT}
    memory.free(first)
    memory.free(second)
    assert not driver.reserved
    assert not driver.mapped


def test_what_was_unmapped_comes_back_where_it_was() -> None:
    driver = FakeDriver(10 * UNIT)
    memory = VirtualMemory(driver)
    addresses = {memory.allocate(size * UNIT, 0) for size in (1, 2, 3)}
    memory.unmap(memory.blocks)
    assert not driver.mapped
    assert driver.reserved.keys() == addresses
    memory.map(memory.blocks)
    assert driver.mapped.keys() == addresses


def test_all_of_it_or_nothing() -> None:
    driver = FakeDriver(6 * UNIT)
    memory = VirtualMemory(driver)
    for size in (1, 2, 3):
        memory.allocate(size * UNIT, 0)
    memory.unmap(memory.blocks)
    driver.room = 5 * UNIT  # others have some of it
    with pytest.raises(torch.OutOfMemoryError):
        memory.map(memory.blocks)
    assert not driver.mapped
    driver.room = 6 * UNIT
    memory.map(memory.blocks)


def test_no_room_leaves_no_addresses_behind() -> None:
    driver = FakeDriver(UNIT)
    memory = VirtualMemory(driver)
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(2 * UNIT, 0)
    assert not driver.reserved
    assert not memory.blocks


@given(st.lists(st.tuples(st.sampled_from(("allocate", "free", "unmap", "map")), st.integers(0, 7)), max_size=30))
def test_any_order_of_calls(calls: list[tuple[str, int]]) -> None:
    driver = FakeDriver(12 * UNIT)
    memory = VirtualMemory(driver)
    for call, number in calls:
        blocks = sorted(memory.blocks, key=lambda block: block.address)
        try:
            if call == "allocate":
                memory.allocate((number + 1) * UNIT // 2, 0)
            elif blocks and call == "free":
                memory.free(blocks[number % len(blocks)].address)
            elif call == "unmap":
                memory.unmap(blocks[:number])
            elif call == "map":
                memory.map(blocks[: number + 1])
        except torch.OutOfMemoryError:
            pass
        assert driver.reserved == {block.address: block.size for block in memory.blocks}
        assert driver.mapped == {block.address: block.size for block in memory.blocks if block.mapped}
