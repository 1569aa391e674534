"""Which prefill attention is chosen, without a GPU: packages and devices are pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aengine.attention import flash_backend
from aengine.kernels.attention.scores import Scores

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


@pytest.mark.parametrize(
    ("modules", "dims", "name"),
    [
        (("flash_attn.cute",), (64, 128, 128), "flash-attn-4"),
        (("flash_attn.cute",), (96, 96), "Triton"),
        (("flash_attn.cute",), (256, 512, 256), "flash-attn-4 and Triton"),
        (("flash_attn",), (96, 80), "flash-attn-2"),
        ((), (100,), "Triton"),
        ((), (512, 128), "torch flash and Triton"),
    ],
)
def test_heads_that_the_flash_kernel_does_not_take_go_to_our_own(
    modules: tuple[str, ...], dims: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    installed(monkeypatch, *modules, major=9)
    chosen = flash_backend.choose_prefill(DEVICE, torch.bfloat16, dims=dims)
    assert chosen.name == name
    refused = [dim for dim in dims if dim in (100, 512) or (dim == 96 and modules == ("flash_attn.cute",))]
    assert all(str(dim) in chosen.why for dim in refused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scores", [Scores(softcap=30.0), Scores(None, torch.zeros(4))], ids=["softcap", "sinks"])
def test_other_scores_never_lie_in_memory_all_at_once(
    scores: Scores, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch reference would hold those of every pair of a prompt's tokens."""
    pytest.importorskip("triton")
    from aengine.attention import triton_chunks

    installed(monkeypatch, major=9)
    seen: list[object] = []
    monkeypatch.setattr(triton_chunks, "attend_chunks", lambda *given, **_: seen.append(given[-1]))
    chosen = flash_backend.choose_prefill(DEVICE, dtype, dims=(64,))
    nothing: Any = type("Nothing", (), {"page_table": None, "seq_lens": None, "query_starts": None})
    chosen(torch.empty(1), torch.empty(1), torch.empty(1), nothing, 1.0, None, scores=scores)
    assert seen == [scores]
