"""Where 4-bit matrices are kept as floats as well, on machines that only say how much memory they have."""

from __future__ import annotations

import msgspec
import pytest
import torch

from aengine.config import EngineConfig
from aengine.kernels.experts.routing.router import Router
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.model.spec.feed_forward import ExpertsSpec

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.runtime.startup.sizing.cuda_memory import MARGIN
from aengine.runtime.startup.unpacked_copies import MOST_COPIES, with_copies

DTYPE = torch.bfloat16
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    demo = ModelConfig.from_folder(resolve_model(None, None))
    return msgspec.structs.replace(
        demo, quantization='{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}'
    )


def just_room(model: ModelConfig) -> int:
    """Return the bytes of a GPU that leaves just enough for keys and values to allow copies."""
    kept, copied = model.weight_bytes(DTYPE), model.with_unpacked_copies().weight_bytes(DTYPE)
    return int((copied - kept) / MOST_COPIES) + kept + MARGIN


def copies(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, memory: int, taken: int = 0,
    dtype: torch.dtype = DTYPE, **knobs: object,
) -> bool:  # fmt: skip
    """taken: of the second GPU's memory."""
    info = {GPUS[0]: (memory, memory), GPUS[1]: (memory - taken, memory)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: info[device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    config = msgspec.convert({"gpu_memory_utilization": 1.0, **knobs}, EngineConfig)
    return with_copies(config, model, dtype, GPUS).unpacked_copies


def test_copies_are_kept_where_they_are_a_small_part_of_what_is_left(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = just_room(model)
    assert copies(monkeypatch, model, room)
    assert not copies(monkeypatch, model, room - 8)
    assert not copies(monkeypatch, model, room, taken=8)  # the tightest GPU decides
    assert not copies(monkeypatch, model, room, gpu_memory_utilization=0.9)


@pytest.mark.parametrize(
    "knobs", [{"unpacked_copies": False}, {"kv_cache_gib": 0.5}, {"num_pages": 64}, {"sleep_mode": True}]
)
def test_knobs_decide_where_they_are_given(
    knobs: dict[str, object], model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not copies(monkeypatch, model, 2 * just_room(model), **knobs)
    assert copies(monkeypatch, model.with_unpacked_copies(), 0, **knobs)  # as configured


def test_there_is_nothing_to_copy_without_4_bits_or_where_they_become_float32(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not copies(monkeypatch, msgspec.structs.replace(model, quantization="{}"), 2**40)
    assert not copies(monkeypatch, model, 2**40, dtype=torch.float32)


def test_a_mixture_has_none_by_default_as_most_of_it_are_experts(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = ExpertsSpec(count=4, inner=64, router=Router(2))
    layers = tuple(msgspec.structs.replace(layer, ffn=experts) for layer in model.layers)
    assert copies(monkeypatch, model, 2**40)
    assert not copies(monkeypatch, msgspec.structs.replace(model, layers=layers), 2**40)
