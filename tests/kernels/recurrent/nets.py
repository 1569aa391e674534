"""Delta nets and Mamba2 as worlds, with their definitions in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.base import Kernels
from aengine.kernels.delta.base import DeltaNet, DeltaWeights
from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.recurrent.state import RecurrentState, StateBatch
from tests.kernels.recurrent.world import World


class DeltaWorld(World):
    def _make_weights(self, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
        self.weights = DeltaWeights(self.heads, conv, a_log, dt_bias, self._random(self.heads.value_dim), 1e-6)

    def net(self, kernels: Kernels) -> DeltaNet:
        return kernels.delta_net(self.weights)

    @property
    def of_reference(self) -> float:
        return 3e-6

    @property
    def of_kernels(self) -> float:
        # Sums of g over a block reach -3,000; float32 is exact to 2e-4 there.
        return 2e-2 if self._narrow else 2e-4 if self._decay > 1 else 5e-6

    def reference(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights
        heads, repeats = weights.heads, weights.heads.value_heads // weights.heads.key_heads
        tokens, filtered = len(qkv), self._filtered(qkv, weights.conv)
        q, k, v = filtered.split((heads.keys, heads.keys, heads.values), dim=1)
        q, k = (x.view(tokens, heads.key_heads, -1).repeat_interleave(repeats, 1) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        v = v.view(tokens, heads.value_heads, -1)
        fade = (-weights.a_log.double().exp() * F.softplus(a.double() + weights.dt_bias.double())).exp()
        beta = b.double().sigmoid()
        s = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64, device=qkv.device)
        outs, states = [], []
        for t in range(tokens):
            s = s * fade[t, :, None, None]
            answer = torch.einsum("hkv,hk->hv", s, k[t])
            s = s + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - answer))
            outs.append(torch.einsum("hkv,hk->hv", s, q[t]) * heads.key_dim**-0.5)
            states.append(s)
        out = torch.stack(outs)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
        return out.flatten(1) * F.silu(z.double()), torch.stack(states)


class MambaWorld(World):
    """Key heads are groups."""

    def _make_weights(self, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
        self.conv_bias, skip = self._random(self.heads.channels, scale=0.5), self._random(self.heads.value_heads)
        self.weights = MambaWeights(self.heads, conv, self.conv_bias, a_log, dt_bias, skip)

    def net(self, kernels: Kernels) -> DeltaNet:
        mamba = kernels.mamba(self.weights)

        def run(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
            return mamba(qkv, z, a, state, batch)

        return run

    @property
    def of_reference(self) -> float:
        return 8e-6 * max(1.0, self._decay)  # sums of g over a block reach thousands, and are subtracted

    @property
    def of_kernels(self) -> float:
        return 3e-2 if self._narrow else 4e-4 if self._decay > 1 else 1e-4  # like the reference

    def reference(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights
        heads, tokens = weights.heads, len(qkv)
        filtered = self._filtered(qkv, weights.conv, self.conv_bias.double())
        x, key, query = filtered.split((heads.values, heads.keys, heads.keys), dim=1)
        x = x.view(tokens, heads.value_heads, -1)
        key, query = (
            one.view(tokens, heads.key_heads, -1).repeat_interleave(heads.value_heads // heads.key_heads, 1)
            for one in (key, query)
        )
        step = F.softplus(a.double() + weights.dt_bias.double())
        fade = (-weights.a_log.double().exp() * step).exp()
        s = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64, device=qkv.device)
        outs, states = [], []
        for t in range(tokens):
            s = s * fade[t, :, None, None] + torch.einsum("hk,hv->hkv", key[t], step[t, :, None] * x[t])
            outs.append(torch.einsum("hkv,hk->hv", s, query[t]) + weights.skip.double()[:, None] * x[t])
            states.append(s)
        return torch.stack(outs).flatten(1) * F.silu(z.double()), torch.stack(states)


BOTH = pytest.mark.parametrize("kind", [DeltaWorld, MambaWorld], ids=["delta", "mamba"])
