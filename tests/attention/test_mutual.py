"""Tokens of an image see all of it in the CUDA backend, and nothing else changes.

Without a GPU, the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer, MutualTokens
from aengine.attention.flash_backend import TorchPrefill
from aengine.attention.triton_backend import TritonAttention, TritonPrefill
from aengine.kernels.kv_scales import encode
from tests.attention.test_triton_backend import SCALE, Work, error, prefill_path, reference, step
from tests.kernels.attention.test_chunk_attention import Images, ends_of
from tests.kernels.conftest import device, tolerance

pytestmark = pytest.mark.gpu
__all__ = ["device"]

# Rows that verify two drafts are chunks before those of prompts. A prefix ends within an image of the first prompt.
DECODES: list[int] = [5, 30]
DRAFTED: Work = [(21, 3), (44, 3)]
SMALL: tuple[Work, Images] = ([(60, 50), (12, 12), (33, 20)], [[(7, 23), (24, 40)], [], [(20, 30)]])
LARGE: tuple[Work, Images] = ([(2000, 1500), (90, 90), (300, 300)], [[(400, 656), (700, 956)], [(3, 80)], []])


class Causal(TorchPrefill):
    """A prefill kernel that lets no token see later ones."""

    def bind(self, layer: AttentionLayer) -> Attend | None:
        attend = super().bind(layer)

        def attend_causally(q: Tensor, k: Tensor, v: Tensor, chunks: AttentionBatch, /) -> Tensor:
            assert attend is not None
            assert chunks.mutual is None
            return attend(q, k, v, chunks)

        return attend_causally


def seeing_step(
    decodes: list[int], drafted: Work, case: tuple[Work, Images], everywhere: bool, heads: tuple[int, int, int],
    dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:  # fmt: skip
    chunks, images = case
    q, k, v, batch = step(decodes, drafted + chunks, *heads, dtype, device)
    ends = torch.nn.functional.pad(ends_of(chunks, images), (len(decodes) + sum(count for _, count in drafted), 0))
    batch.mutual = MutualTokens(ends.to(device), len(decodes) + len(drafted), everywhere)
    return q, k, v, batch


@pytest.mark.interpreted(8)
@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(("decodes", "drafted"), [(DECODES, DRAFTED), ([], [])], ids=["beside decodes", "alone"])
@pytest.mark.parametrize("kind", ["torch", "Triton"])
def test_float32_is_exact_tiny(
    kind: str, decodes: list[int], drafted: Work, everywhere: bool, window: int | None, device: torch.device
) -> None:
    q, k, v, batch = seeing_step(decodes, drafted, SMALL, everywhere, (4, 2, 16), torch.float32, device)
    expected = reference(q, k, v, batch, window)
    causal = reference(q, k, v, replace(batch, mutual=None), window)
    assert (error(expected, causal) > 0.1) == (everywhere or window is not None)
    prefill = Causal("") if kind == "torch" else TritonPrefill()
    attend = TritonAttention(lambda: prefill).bind(AttentionLayer(16, SCALE, window))
    for _ in range(2):  # the second layer uses the first one's plans
        assert error(attend(q, k, v, batch), expected) < tolerance(torch.float32)


@pytest.mark.thinned
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("path", ["flash-attn-4", "flash-attn-2", "torch flash"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 16, 128), (16, 8, 256), (8, 1, 512)])
def test_with_every_prefill_kernel(
    heads: int, kv_heads: int, dim: int, path: str, window: int | None, codes: bool, device: torch.device
) -> None:
    if device.type == "cpu":
        pytest.skip("the prefill kernels need a CUDA device")
    q, k, v, batch = seeing_step(DECODES, DRAFTED, LARGE, True, (heads, kv_heads, dim), torch.bfloat16, device)
    backend = TritonAttention(lambda: prefill_path(path, device, longest=2000 if codes else 0))
    layer = AttentionLayer(dim, SCALE, window)
    if codes:
        k, v, layer = encode(k, 0.2), encode(v, 3.0), AttentionLayer(dim, SCALE * 0.2, window, value_scale=3.0)
    key, value = (k.float() * 0.2, v.float() * 3.0) if codes else (k, v)
    assert error(backend.bind(layer)(q, k, v, batch), reference(q, key, value, batch, window)) < 6e-3
