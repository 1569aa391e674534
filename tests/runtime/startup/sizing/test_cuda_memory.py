"""The KV pool gets all of the budget that nothing else takes at any one time, on a device that only counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.runtime.startup.sizing import cuda_memory
from aengine.runtime.startup.sizing.cuda_memory import MARGIN, room_for_kv

MB = 2**20
TOTAL, OTHERS, WEIGHTS, POOL, ROWS = 80_000 * MB, 500 * MB, 16_000 * MB, 300 * MB, 20 * MB
STEP, KEPT, GRAPHS, MORE_GRAPHS = 2_000 * MB, 256 * MB, 400 * MB, 100 * MB


Measure = Callable[..., tuple[int, list[int] | None]]


class Device:
    """What `torch.cuda` says of memory, of allocations by name."""

    def __init__(self) -> None:
        self.others_take = 0  # while the largest step runs
        self.unmapped = 0  # what torch does not know of
        self.begin()

    def begin(self) -> None:
        self.taken = {"weights": WEIGHTS}
        self.peak = WEIGHTS
        self.others = OTHERS

    def take(self, **sizes: int) -> None:
        self.taken |= sizes
        self.peak = max(self.peak, self.allocated())

    def give(self, *names: str) -> None:
        for name in names:
            self.taken.pop(name, None)

    def allocated(self, device: object = None) -> int:
        return sum(self.taken.values()) - self.taken.get("graphs", 0)

    def reserved(self, device: object = None) -> int:
        return self.allocated() + self.unmapped

    def bound(self, share: float, device: object = None) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"Invalid fraction value: {share}")

    def info(self, device: object = None) -> tuple[int, int]:
        return TOTAL - self.others - sum(self.taken.values()), TOTAL

    def reset_peak(self, device: object = None) -> None:
        self.peak = self.allocated()


class Trial:
    """An executor that takes memory for itself, for each step, and some that stays: a backend's gathered keys."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.take(pool=POOL, rows=ROWS)

    def warm_up(self, plans: Iterable[object]) -> None:
        self._device.others += self._device.others_take
        for _ in plans:
            self._device.take(kept=KEPT)
            self._device.take(step=STEP)
            self._device.give("step")

    def capture(self) -> None:
        self._device.take(graphs=GRAPHS)

    def __del__(self) -> None:
        self._device.give("pool", "rows", "graphs")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, device: Device) -> Measure:
    """Return the pool's bytes for this share of the device, and the measured memory, from a new process."""
    for name, value in {
        "memory_allocated": device.allocated,
        "memory_reserved": device.reserved,
        "max_memory_allocated": lambda _: device.peak,
        "reset_peak_memory_stats": device.reset_peak,
        "mem_get_info": device.info,
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": device.bound,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_memory, "trial_pool", lambda *_: (1, 16))
    monkeypatch.setattr(cuda_memory, "trial_steps", lambda *_: ["plain", "greedy"])
    monkeypatch.setattr(cuda_memory, "capture", Trial.capture)
    pages = SimpleNamespace(page_bytes=POOL)
    shape = SimpleNamespace(lora=None, kv_shape=lambda *_: pages, windows=[], max_position_embeddings=1024, tower=None)
    decoder: Any = SimpleNamespace(device=torch.device("cuda", 0), config=shape, kv_dtype=torch.bfloat16)

    def measure(share: float, known: list[int] | None = None) -> tuple[int, list[int] | None]:
        device.begin()
        config = EngineConfig(model="any", gpu_memory_utilization=share)
        make: Any = lambda *_: Trial(device)  # noqa: E731
        return room_for_kv(config, [decoder], 8192, make, MORE_GRAPHS, known=known)

    return measure


def test_what_stays_between_steps_is_counted_once(room: Measure) -> None:
    rest = OTHERS + WEIGHTS + ROWS + KEPT + STEP + GRAPHS + MORE_GRAPHS + MARGIN
    assert room(0.5)[0] == TOTAL // 2 - rest


def test_a_budget_that_everything_else_fills_is_refused_with_its_arithmetic(room: Measure) -> None:
    with pytest.raises(ConfigError, match=r"others use 0\.5, the weights 15\.6, the largest step 2\.0, the graphs"):
        room(0.2)


def test_what_one_start_up_measures_the_next_one_takes_as_it_is(room: Measure) -> None:
    nbytes, needs = room(0.5)
    assert needs == [KEPT + STEP + GRAPHS + MORE_GRAPHS + ROWS]
    assert room(0.5, needs) == (nbytes, None)
    assert room(0.25, needs)[0] == nbytes - TOTAL // 4
    with pytest.raises(ConfigError, match=r"others use 0\.5, the weights 15\.6, all else 2\.7: nothing is left"):
        room(0.2, needs)


def test_what_others_took_meanwhile_is_not_remembered(room: Measure, device: Device) -> None:
    device.others_take = 3_000 * MB
    nbytes, needs = room(0.5)
    assert nbytes > 0
    assert needs is None


def test_all_of_a_device_is_the_most_that_torch_may_have(room: Measure, device: Device) -> None:
    """Memory that can sleep may have been given back by then, and torch counts it as it was."""
    nbytes, needs = room(1.0)
    device.unmapped = 1_000 * MB
    assert room(1.0)[0] == room(1.0, needs)[0] == nbytes - (device.unmapped - OTHERS)
