"""The reference: plain torch on any device. Every other adapted linear is tested against this one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.lora.base import NO_ADAPTER, AdapterWeights, TokenAdapters


class TorchAdapted:
    """A linear with what each token's adapter adds. Without adapters it calls the linear and nothing else.

    On a CPU it looks which adapters the tokens have and reads those alone. Elsewhere it must not ask the device: it
    multiplies with all of them, and leaves to each token what its own gives.
    """

    def __init__(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters) -> None:
        self.inputs = linear.inputs
        self.outputs = linear.outputs
        self._linear = linear
        self._weights = weights
        self._tokens = tokens

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        places = self._tokens.places
        if places is None:
            return self._linear.apply(x, norm=norm, gated=gated, residual=residual)
        if norm is not None:
            x = norm(x)
        elif gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate).mul_(up)
        out = self._linear.apply(x, residual=residual)
        add = add_present if places.device.type == "cpu" else add_all
        return add(out, x, self._weights, places)

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> None:
        return None


def add_present(out: Tensor, x: Tensor, weights: AdapterWeights, places: Tensor) -> Tensor:
    """out [tokens, outputs], which is used up, and what the adapters in `places` make of x [tokens, inputs]."""
    present = [place for place in places.unique().tolist() if place != NO_ADAPTER]
    if len(present) == 1 and bool((places == present[0]).all()):
        return out.add_(_product(x, weights, present[0]))
    for place in present:
        rows = (places == place).nonzero().flatten()
        out.index_add_(0, rows, _product(x[rows], weights, place))
    return out


def _product(x: Tensor, weights: AdapterWeights, place: int) -> Tensor:
    """What one adapter adds: x [n, inputs] -> [n, outputs]."""
    inner = F.linear(x, weights.a[place]).split(weights.rank, dim=-1)  # of each part, [n, rank]
    parts = weights.b[place].split(weights.outputs)
    return torch.cat([F.linear(*part) for part in zip(inner, parts, strict=True)], dim=-1)


def add_all(out: Tensor, x: Tensor, weights: AdapterWeights, places: Tensor) -> Tensor:
    """The same as `add_present`, without a question to the device."""
    count, rank = len(weights.a), weights.rank
    inner = F.linear(x, weights.a.flatten(0, 1)).view(len(x), count, -1)  # [tokens, places, parts * rank]
    own = places.unsqueeze(-1) == torch.arange(count, device=places.device)  # [tokens, places]
    inner = inner.masked_fill(~own.unsqueeze(-1), 0.0)
    at = 0
    for part, width in enumerate(weights.outputs):
        first = inner[..., part * rank : (part + 1) * rank].flatten(1)  # [tokens, places * rank]
        second = weights.b[:, at : at + width].transpose(1, 2).flatten(0, 1)  # [places * rank, outputs]
        out[:, at : at + width] += first @ second
        at += width
    return out
