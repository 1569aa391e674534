"""Adapters are copied to a GPU through two buffers, and no buffer is filled before its last copy is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aengine.model.lora.memory import FactorCopy
from aengine.runtime.adapters import HostFiller
from aengine.runtime.cuda import adapters

empty = torch.empty


class Event:
    """An event. Work enqueued before `record` is executed when the event is awaited."""

    def __init__(self, queue: list[Callable[[], object]], **_: object) -> None:
        self._queue = queue
        self._before: list[Callable[[], object]] = []

    def record(self, stream: object) -> None:
        self._before = list(self._queue)

    def synchronize(self) -> None:
        for copy in self._before:
            if copy in self._queue:
                self._queue.remove(copy)
                copy()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Copies that are enqueued read their source when the device comes to them: when an event is waited for."""
    queue: list[Callable[[], object]] = []
    copy_ = torch.Tensor.copy_

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            queue.append(lambda: copy_(self, source))
            return self
        return copy_(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event(queue, **options))
    return queue


@pytest.mark.parametrize("buffer_bytes", [64, 100, 1000, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_what_a_cpu_copies(
    buffer_bytes: int, dtype: torch.dtype, late_copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "BUFFER_BYTES", buffer_bytes)
    stream: Any = None
    filler, host = adapters.DeviceFiller(torch.device("cpu"), stream), HostFiller()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # adapters, one after the other
        got, expected = [], []
        for rows, columns, own_rows, own_columns in ((8, 16, 8, 16), (30, 8, 30, 3), (8, 16, 5, 16), (4, 4, 0, 0)):
            values = torch.randn(2 * own_rows, own_columns, generator=generator).to(dtype)[::2]
            places = [torch.full((rows, columns), 7.0, dtype=dtype) for _ in range(2)]
            filler.fill(FactorCopy(places[0], values))
            host.fill(FactorCopy(places[1], values))
            got.append(places[0])
            expected.append(places[1])
        filler.wait()
        assert not late_copies
        assert all(torch.equal(one, other) for one, other in zip(got, expected))


def test_a_row_that_fits_no_buffer_is_refused(late_copies: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "BUFFER_BYTES", 64)
    stream: Any = None
    filler = adapters.DeviceFiller(torch.device("cpu"), stream)
    with pytest.raises(ValueError, match="does not fit into a buffer"):
        filler.fill(FactorCopy(torch.zeros(1, 17), torch.zeros(1, 17)))
