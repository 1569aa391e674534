"""Which prefill attention is chosen, without a GPU: packages and devices are pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aengine.attention import flash_backend
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
        pytest.importorskip("triton")  # it copies pages together with a kernel of ours
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


SINKS = (64, False)


@pytest.mark.parametrize(
    ("modules", "dtype", "kinds", "name", "why"),
    [
        (("flash_attn.cute",), torch.bfloat16, [(64, True), SINKS], "flash-attn-4", "installed"),
        (("flash_attn.cute",), torch.bfloat16, [(96, True)], "Triton", "heads of 96"),
        (("flash_attn.cute",), torch.bfloat16, [(256, True), (512, True)], "flash-attn-4 and Triton", "heads of 512"),
        (("flash_attn",), torch.bfloat16, [(96, True), (80, True)], "flash-attn-2", "not installed"),
        ((), torch.bfloat16, [(100, True)], "Triton", "heads of 100"),
        ((), torch.bfloat16, [SINKS], "Triton", "heads of 64 with sinks"),
        ((), torch.bfloat16, [(64, True), SINKS], "torch flash and Triton", "heads of 64 with sinks"),
        ((), torch.float32, [(100, True)], "torch", "float32"),
        ((), torch.float32, [SINKS], "Triton", "heads of 64 with sinks"),
    ],
)
def test_what_the_flash_kernel_does_not_take_goes_to_our_own(
    modules: tuple[str, ...],
    dtype: torch.dtype,
    kinds: list[flash_backend.Kind],
    name: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sinks and capped scores too: torch would hold the scores of all pairs of a prompt's tokens at once."""
    pytest.importorskip("triton")
    installed(monkeypatch, *modules, major=9)
    chosen = flash_backend.choose_prefill(DEVICE, dtype, kinds=kinds)
    assert chosen.name == name
    assert why in chosen.why
    assert chosen.capturable == (name in ("flash-attn-4", "Triton", "flash-attn-4 and Triton"))


def test_each_layer_goes_where_its_kind_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from aengine.attention import triton_chunks

    seen: list[object] = []

    def attend_chunks(*given: object, value_scale: float) -> None:
        seen.append((*given[6:], value_scale))

    monkeypatch.setattr(triton_chunks, "attend_chunks", attend_chunks)
    installed(monkeypatch, major=9)
    chosen = flash_backend.choose_prefill(DEVICE, torch.bfloat16, kinds=[(64, True), SINKS])
    monkeypatch.setattr(flash_backend.OnGathered, "__call__", lambda *_: seen.append("flash"))
    x, sinks = torch.empty(1, 4, 64), Scores(None, torch.zeros(4))
    batch: Any = type("Batch", (), {"page_table": None, "seq_lens": None, "query_starts": None})
    chosen(x, x, x, batch, 0.3, 40, 2.0, sinks)
    chosen(x, x, x, batch, 0.3, 40)
    assert seen == [(0.3, 40, sinks, 2.0), "flash"]
