"""Which GPUs a model is spread over, on machines that only say how much memory they have."""

from __future__ import annotations

from typing import Protocol

import msgspec
import pytest
import torch

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.runtime.startup.gpus import LEAST_ROOM, choose_gpus
from aengine.runtime.startup.sizing.cuda_memory import MARGIN

DTYPE = torch.bfloat16


class Machine(Protocol):
    """Makes the machine that the test is on."""

    def __call__(self, gpus: int, memory: int, *, taken: dict[int, int] | None = None) -> None:
        """memory: bytes of each GPU. taken: bytes that other processes use, by GPU."""
        ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def make(gpus: int, memory: int, *, taken: dict[int, int] | None = None) -> None:
        def info(device: torch.device) -> tuple[int, int]:
            return memory - (taken or {}).get(device.index, 0), memory

        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "mem_get_info", info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)

    return make


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    """Of 8 heads and a vocabulary so large that its halves are halves of the weights."""
    demo = ModelConfig.from_folder(resolve_model(None, None))
    layers = tuple(
        msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, heads=8, kv_heads=8))
        for layer in demo.layers
    )
    return msgspec.structs.replace(demo, layers=layers, vocab_size=10_000_000)


def chosen(model: ModelConfig, first: int = 0, **knobs: object) -> list[int]:
    config = msgspec.convert({"gpu_memory_utilization": 1.0, **knobs}, EngineConfig)
    return [gpu.index for gpu in choose_gpus(config, model, DTYPE, torch.device("cuda", first))]


def just_holds(model: ModelConfig, ranks: int) -> int:
    """Return the bytes of a GPU that has just enough room for the weights of one rank."""
    return int((model.spread_over(ranks).weight_bytes(DTYPE) + MARGIN) / (1 - LEAST_ROOM)) + 8


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_auto_takes_as_few_as_hold_the_model(ranks: int, model: ModelConfig, machine: Machine) -> None:
    machine(8, just_holds(model, ranks))
    assert chosen(model) == list(range(ranks))


def test_auto_takes_as_few_as_hold_it_where_others_have_a_part_of_one(model: ModelConfig, machine: Machine) -> None:
    """The GPU with the least memory decides, not the first."""
    memory = just_holds(model, 2)
    machine(8, memory, taken={1: (memory - just_holds(model, 4)) // 2})
    assert chosen(model) == [0, 1, 2, 3]
    assert chosen(model, first=2) == [2, 3]


def test_auto_takes_all_that_can_share_a_model_that_is_too_large(model: ModelConfig, machine: Machine) -> None:
    machine(7, just_holds(model, 8))
    assert chosen(model) == [0, 1, 2, 3]


def test_ranks_lie_on_the_named_device_and_those_behind_it(model: ModelConfig, machine: Machine) -> None:
    machine(4, just_holds(model, 1))
    assert chosen(model, first=2, tensor_parallel_size=2) == [2, 3]


def test_more_than_there_are_from_the_named_device_on_are_refused(model: ModelConfig, machine: Machine) -> None:
    machine(4, just_holds(model, 1))
    with pytest.raises(ConfigError, match="there are 1 usable ones from cuda:3 on"):
        chosen(model, first=3, tensor_parallel_size=2)
