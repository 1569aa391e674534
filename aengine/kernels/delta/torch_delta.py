"""The reference for delta nets, in plain torch and float32, for any device. Others are tested against it.

It needs a host sync, so it cannot be captured into a graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.delta.torch_drafts import decode_drafts
from aengine.kernels.recurrent.state import BLOCK, RecurrentState, StateBatch


class TorchDelta:
    """A `DeltaNet` that computes all decodes at once, and chunks one after the other, block by block."""

    def __init__(self, weights: DeltaWeights) -> None:
        self._weights = weights

    def __call__(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        weights = self._weights
        g = -weights.a_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())  # [tokens, value_heads]
        beta = b.float().sigmoid()
        out = qkv.new_zeros(len(qkv), weights.heads.values)
        drafted = batch.drafted
        if drafted is None:
            self._decode(out, qkv, z, g, beta, state, batch)
        else:
            computed, results = decode_drafts(self._filtered, qkv, g, beta, state, batch, drafted)
            out[computed] = self._normed(results, z[computed])
        reads = None if drafted is None else drafted.read.tolist()
        slots, sources, starts = batch.slots.tolist(), batch.sources.tolist(), batch.starts.tolist()
        for chunk in range(batch.num_chunks):
            tokens, index = slice(starts[chunk], starts[chunk + 1]), batch.num_decodes + chunk
            if tokens.start < tokens.stop and slots[index] > 0 and (reads is None or reads[index] < 0):
                first, saves = int(batch.positions[tokens.start]), batch.saves[tokens].tolist()
                inputs = qkv[tokens], z[tokens], g[tokens], beta[tokens]
                out[tokens] = self._prefill(*inputs, state, sources[index], slots[index], first, saves)
        return out

    def _decode(
        self, out: Tensor, qkv: Tensor, z: Tensor, g: Tensor, beta: Tensor, state: RecurrentState, batch: StateBatch
    ) -> None:
        rows = (batch.slots[: batch.num_decodes] > 0).nonzero().flatten()  # decodes that are not padding
        if not len(rows):
            return
        slots, sources, positions = batch.slots[rows].long(), batch.sources[rows].long(), batch.positions[rows]
        qkv, z, g, beta = qkv[rows], z[rows], g[rows], beta[rows]
        # The inputs of the convolution, the current token last.
        width = state.conv.shape[1]
        past = torch.arange(1 - width, 0, device=qkv.device) + positions.unsqueeze(-1)  # [rows, width - 1]
        seen = state.conv[sources.unsqueeze(-1), past % width]
        seen = seen.masked_fill(((past < 0) | (sources == 0).unsqueeze(-1)).unsqueeze(-1), 0.0)
        seen = torch.cat((seen, qkv.unsqueeze(1)), dim=1)  # [rows, width, channels]
        q, k, v = self._filtered(seen)
        s = state.recurrence[sources].float()  # [rows, heads, key_dim, value_dim]
        s = s.masked_fill((sources == 0)[:, None, None, None], 0.0).mul_(g.exp()[..., None, None])
        wrong = beta.unsqueeze(-1) * (v - torch.einsum("rhkv,rhk->rhv", s, k))
        s.add_(k.unsqueeze(-1) * wrong.unsqueeze(-2))
        out[rows] = self._normed(torch.einsum("rhkv,rhk->rhv", s, q), z)
        saves = batch.saves[rows].long()
        kept = (saves > 0).nonzero().flatten()
        last = positions.unsqueeze(-1) + torch.arange(1 - width, 1, device=qkv.device)  # [rows, width]
        for to, of in ((slots, slice(None)), (saves[kept], kept)):
            state.conv[to.unsqueeze(-1), last[of] % width] = seen[of]
            state.recurrence[to] = s[of].to(state.recurrence.dtype)

    def _prefill(
        self,
        qkv: Tensor,
        z: Tensor,
        g: Tensor,
        beta: Tensor,
        state: RecurrentState,
        source: int,
        slot: int,
        first: int,
        saves: list[int],
    ) -> Tensor:
        """Return the results [tokens, values] of a chunk whose first token has position `first`."""
        width = state.conv.shape[1]
        past = torch.arange(first - width + 1, first, device=qkv.device)
        seen = state.conv[source, past % width].masked_fill((past < 0).unsqueeze(-1) | (source == 0), 0.0)
        seen = torch.cat((seen, qkv))  # [width - 1 + tokens, channels]
        filtered = F.conv1d(seen.float().T, self._weights.conv.float().unsqueeze(1), groups=seen.shape[1])
        q, k, v = (part.transpose(0, 1) for part in self._heads(filtered.T))  # [heads, tokens, dim]
        g, beta = g.T, beta.T  # [heads, tokens]
        s = state.recurrence[source].float()  # [heads, key_dim, value_dim]
        if source == 0:
            s = torch.zeros_like(s)
        results, at, tokens = [], 0, len(qkv)
        while at < tokens:
            end = min(tokens, at + BLOCK - (first + at) % BLOCK)
            block = slice(at, end)
            out, s = _delta(q[:, block], k[:, block], v[:, block], g[:, block], beta[:, block], s)
            results.append(out)
            last = torch.arange(first + end - width, first + end, device=qkv.device)
            for to in (saves[end - 1], slot if end == tokens else 0):
                if to > 0:
                    state.conv[to, last % width] = seen[end - 1 : end - 1 + width]
                    state.recurrence[to] = s.to(state.recurrence.dtype)
            at = end
        return self._normed(torch.cat(results, dim=1).transpose(0, 1), z)

    def _filtered(self, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [rows, value_heads, dim] of one token of each row. seen: [rows, width, channels]."""
        return self._heads((seen.float() * self._weights.conv.float().T).sum(1))

    def _heads(self, filtered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply SiLU to the convolution's output [..., channels], and return q, k, v [..., value_heads, dim], q and k
        normed.
        """
        heads = self._weights.heads
        q, k, v = F.silu(filtered).split((heads.keys, heads.keys, heads.values), dim=-1)
        repeats = heads.value_heads // heads.key_heads
        q, k = (_unit(part.unflatten(-1, (heads.key_heads, -1))).repeat_interleave(repeats, -2) for part in (q, k))
        return q * heads.key_dim**-0.5, k, v.unflatten(-1, (heads.value_heads, -1))

    def _normed(self, out: Tensor, z: Tensor) -> Tensor:
        """Return the gated norm [tokens, values] in z's dtype. out: [tokens, value_heads, value_dim] float32."""
        normed = F.rms_norm(out, out.shape[-1:], None, self._weights.eps).to(z.dtype) * self._weights.norm
        return (normed.flatten(1).float() * F.silu(z.float())).to(z.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results [heads, n, value_dim] of n consecutive tokens, and the state after them.

    q, k [heads, n, key_dim], v [heads, n, value_dim], g, beta [heads, n], state s [heads, key_dim, value_dim]. Each
    token's correction depends on earlier corrections: a triangular system.
    """
    total = g.cumsum(-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    fades = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()  # [heads, n, n]
    fade, beta = total.exp().unsqueeze(-1), beta.unsqueeze(-1)  # [heads, n, 1]
    system = (beta * k) @ k.mT * fades
    wrong = beta * (v - fade * (k @ s))
    written = torch.linalg.solve_triangular(system, wrong, upper=False, unitriangular=True)
    out = fade * (q @ s) + (q @ k.mT * fades) @ written
    left = (total[..., -1:] - total).exp().unsqueeze(-1)  # how much of each correction is left at the end
    return out, s * fade[:, -1:] + (k * left).mT @ written
