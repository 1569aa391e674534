"""What becomes of latents and of queries before these meet, and the reference that computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.kv_scales import FP8, as_bytes, encode


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """weight [rank]: of the norm of latents. rotated: numbers behind the first `rank` of a latent, and at the end of
    each query head, that are turned; interleaved: neighbours are pairs, else those half of `rotated` apart."""

    weight: Tensor
    eps: float
    rotated: int
    interleaved: bool

    @property
    def rank(self) -> int:
        return len(self.weight)


def torch_latent_inputs(
    latents: Tensor, q: Tensor, heads: LatentHeads, cos_sin: Tensor, positions: Tensor, cache: Tensor, slots: Tensor,
    out: Tensor, scale: float,
) -> None:  # fmt: skip
    """As `Kernels.latent_inputs`."""
    angles = cos_sin.index_select(0, positions).unsqueeze(1)
    normed = F.rms_norm(latents[:, : heads.rank].float(), (heads.rank,), None, heads.eps).to(latents.dtype)
    ends = _turned(latents[:, None, heads.rank :], angles, heads.interleaved).squeeze(1)
    kept = torch.cat((normed.mul_(heads.weight), ends), dim=1)
    codes = encode(kept, scale) if cache.dtype == FP8 else kept.to(cache.dtype)
    as_bytes(cache).view(-1, kept.shape[1]).index_copy_(0, slots, as_bytes(codes))
    out[..., heads.rank :] = _turned(q[..., -heads.rotated :], angles, heads.interleaved)


def _turned(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, rotated], cos_sin [tokens, 1, rotated]: the first of all pairs, then the second."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
