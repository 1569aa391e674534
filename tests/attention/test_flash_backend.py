"""Which prefill kernel is chosen. Packages and devices are simulated, so no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aengine.attention import flash_backend
from aengine.attention.base import AttentionLayer
from aengine.kernels.attention.heads import Scores

DEVICE = torch.device("cuda", 0)


def installed(monkeypatch: pytest.MonkeyPatch, *modules: str, major: int) -> None:
    monkeypatch.setattr(flash_backend, "_import", lambda module: print if module in modules else None)
    monkeypatch.setattr(flash_backend, "keep_compiled", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))


@pytest.mark.parametrize(
    ("modules", "major", "name"),
    [
        (("flash_attn.cute", "flash_attn"), 9, "flash-attn-4"),
        (("flash_attn.cute",), 10, "flash-attn-4"),
        (("flash_attn.cute", "flash_attn"), 8, "flash-attn-2"),
        (("flash_attn",), 9, "flash-attn-2"),
        (("flash_attn.cute",), 8, "torch flash"),
        (("flash_attn.cute",), 12, "torch flash"),
        ((), 9, "torch flash"),
    ],
)
def test_the_best_that_is_installed_and_runs_on_the_device(
    modules: tuple[str, ...], major: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "flash-attn-4":
        pytest.importorskip("triton")  # our own kernel copies its pages
    installed(monkeypatch, *modules, major=major)
    chosen = flash_backend.choose_prefill(DEVICE, torch.bfloat16)
    assert chosen.name == name
    assert chosen.why


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, major=9)
    assert "flash-attn-4 is not installed" in flash_backend.choose_prefill(DEVICE, torch.float16).why
    installed(monkeypatch, major=8)
    assert "does not run on this device" in flash_backend.choose_prefill(DEVICE, torch.float16).why


def test_float32_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "flash_attn.cute", major=9)
    chosen = flash_backend.choose_prefill(DEVICE, torch.float32)
    assert chosen.name == "torch"
    assert "float32" in chosen.why


Kind = tuple[int, bool]  # head_dim, and whether each head has a sink
PLAIN, SINKS = (64, False), (64, True)


def layer_of(kind: Kind, **more: Any) -> AttentionLayer:
    dim, sinks = kind
    return AttentionLayer(dim, 0.3, scores=Scores(None, torch.zeros(4) if sinks else None), **more)


@pytest.mark.parametrize(
    ("modules", "dtype", "kinds", "name", "why"),
    [
        (("flash_attn.cute",), torch.bfloat16, [PLAIN, SINKS], "flash-attn-4", "installed"),
        (("flash_attn.cute",), torch.bfloat16, [(96, False)], "Triton", "heads of 96"),
        (("flash_attn.cute",), torch.bfloat16, [(256, False), (512, False)], "flash-attn-4 and Triton", "heads of 512"),
        (("flash_attn",), torch.bfloat16, [(96, False), (80, False)], "flash-attn-2", "not installed"),
        ((), torch.bfloat16, [(100, False)], "Triton", "heads of 100"),
        ((), torch.bfloat16, [SINKS], "Triton", "heads of 64 with sinks"),
        ((), torch.bfloat16, [PLAIN, SINKS], "torch flash and Triton", "heads of 64 with sinks"),
        ((), torch.float32, [(100, False)], "torch", "float32"),
        ((), torch.float32, [SINKS], "Triton", "heads of 64 with sinks"),
    ],
)
def test_layers_that_the_prefill_kernel_does_not_support_have_our_own(
    modules: tuple[str, ...],
    dtype: torch.dtype,
    kinds: list[Kind],
    name: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes sinks and capped scores: torch would hold the scores of all pairs of a prompt's tokens."""
    triton_backend = pytest.importorskip("aengine.attention.triton_backend")
    installed(monkeypatch, *modules, major=9)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(DEVICE, dtype))
    for kind in kinds:
        backend.bind(layer_of(kind))
    assert backend.name == f"Triton (decode), {name} (prefill)"
    assert why in backend.why
    assert backend.capturable == (name in ("flash-attn-4", "Triton", "flash-attn-4 and Triton"))


def test_each_layer_is_bound_to_the_kernel_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_backend = pytest.importorskip("aengine.attention.triton_backend")
    seen: list[object] = []

    def attend_chunks(*given: object, value_scale: float) -> None:
        seen.append((*given[6:], value_scale))

    monkeypatch.setattr(triton_backend, "attend_chunks", attend_chunks)
    installed(monkeypatch, major=9)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(DEVICE, torch.bfloat16))
    monkeypatch.setattr(flash_backend.OnGathered, "attend_for", lambda *_: lambda *_: seen.append("flash"))
    x = torch.empty(1, 4, 64)
    batch: Any = type("Batch", (), {"page_table": None, "seq_lens": None, "query_starts": None})
    with_sinks = layer_of(SINKS, window=40, value_scale=2.0)
    backend.bind_prefill(with_sinks)(x, x, x, batch)
    backend.bind_prefill(layer_of(PLAIN, window=40))(x, x, x, batch)
    assert seen == [(0.3, 40, with_sinks.scores, 2.0), "flash"]
