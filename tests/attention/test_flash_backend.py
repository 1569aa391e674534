"""Which prefill attention is chosen, without a GPU: packages and devices are pretended."""

from __future__ import annotations

import pytest
import torch

from aengine.attention import flash_backend

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
