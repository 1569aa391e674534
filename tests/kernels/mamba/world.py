"""Runs sequences through Mamba2 token by token in float64, and steps over parts of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.delta.base import DeltaNet
from aengine.kernels.mamba.base import Mamba, MambaHeads, MambaWeights
from aengine.kernels.recurrent.state import RecurrentState, StateBatch
from tests.kernels.delta.drafting import DraftingWorld
from tests.kernels.delta.reference import WIDTH


class MambaWorld(DraftingWorld):
    """The world of delta nets with Mamba2 in it: key heads are groups. Of the inputs, b is not used."""

    def _make_weights(self, decay: float) -> None:
        heads = self.heads
        self.mamba = MambaWeights(
            MambaHeads(heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim),
            self._random(heads.channels, WIDTH, scale=0.5),
            self._random(heads.channels, scale=0.5),
            self._random(heads.value_heads, scale=0.5) + torch.tensor(decay).log().to(self.dtype).to(self.device),
            self._random(heads.value_heads),
            self._random(heads.value_heads),
        )

    def _expected(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return reference(self.mamba, qkv, z, a)


def as_delta_net(mamba: Mamba) -> DeltaNet:
    """Return the layer with the arguments of a delta net."""

    def run(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        return mamba(qkv, z, a, state, batch)

    return run


def reference(weights: MambaWeights, xbc: Tensor, z: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the definition token by token: results [tokens, values], and the state after each token."""
    heads, tokens, conv = weights.heads, len(xbc), weights.conv.double()
    padded = F.pad(xbc.double(), (0, 0, WIDTH - 1, 0))
    filtered = torch.stack([(padded[t : t + WIDTH] * conv.T).sum(0) for t in range(tokens)])
    if weights.conv_bias is not None:
        filtered = filtered + weights.conv_bias.double()
    x, b, c = F.silu(filtered).split((heads.values, heads.keys, heads.keys), dim=1)
    x = x.view(tokens, heads.heads, -1)
    b, c = (one.view(tokens, heads.groups, -1).repeat_interleave(heads.heads // heads.groups, 1) for one in (b, c))
    step = F.softplus(dt.double() + weights.dt_bias.double())
    fade = (-weights.a_log.double().exp() * step).exp()
    s = torch.zeros(heads.heads, heads.state_dim, heads.head_dim, dtype=torch.float64, device=xbc.device)
    outs, states = [], []
    for t in range(tokens):
        s = s * fade[t, :, None, None] + torch.einsum("hk,hv->hkv", b[t], step[t, :, None] * x[t])
        outs.append(torch.einsum("hkv,hk->hv", s, c[t]) + weights.skip.double()[:, None] * x[t])
        states.append(s)
    return torch.stack(outs).flatten(1) * F.silu(z.double()), torch.stack(states)
