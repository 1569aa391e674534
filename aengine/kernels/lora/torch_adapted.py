"""The reference for adapters, in plain torch on any device. Other implementations are tested against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.experts.torch_experts import TorchExperts
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.lora.base import NO_ADAPTER, AdapterWeights, ExpertAdapters, TokenAdapters


class TorchAdapted:
    """A linear with each token's adapter. Without adapters it only calls the linear.

    On a CPU it reads only the adapters that tokens have. On another device that would need a host sync. So it
    multiplies with all adapters, and masks the results of those that a token does not have.
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
    """Return out [tokens, outputs] plus the product of x [tokens, inputs] and each token's adapter.

    May reuse out's memory.

    places: [tokens] int32. Needs a host sync if it is not on the CPU.
    """
    present = [place for place in places.unique().tolist() if place != NO_ADAPTER]
    if len(present) == 1 and bool((places == present[0]).all()):
        return out.add_(_product(x, weights, present[0]))
    for place in present:
        rows = (places == place).nonzero().flatten()
        out.index_add_(0, rows, _product(x[rows], weights, place))
    return out


def _product(x: Tensor, weights: AdapterWeights, place: int) -> Tensor:
    """Return the product of x [n, inputs] and one adapter, [n, outputs]."""
    inner = F.linear(x, weights.a[place]).split(weights.rank, dim=-1)  # for each part, [n, rank]
    parts = weights.b[place].split(weights.outputs)
    return torch.cat([F.linear(*part) for part in zip(inner, parts, strict=True)], dim=-1)


def add_all(out: Tensor, x: Tensor, weights: AdapterWeights, places: Tensor) -> Tensor:
    """Like `add_present`, without a host sync."""
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


class TorchAdaptedExperts:
    """Experts with each token's adapter. Without adapters it only calls the experts. Needs a host sync."""

    def __init__(self, experts: TorchExperts, weights: ExpertAdapters, tokens: TokenAdapters) -> None:
        self.experts = experts.experts
        self.hidden = experts.hidden
        self._experts = experts
        self._weights = weights
        self._tokens = tokens

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        places = self._tokens.places
        if places is None:
            return self._experts.add_to(h, ids, weights, residual)
        return _Adapted(self._experts, self._weights, places).add_to(h, ids, weights, residual)


class _Adapted(TorchExperts):
    """The experts of one pass with the adapters of its tokens."""

    def __init__(self, experts: TorchExperts, weights: ExpertAdapters, places: Tensor) -> None:
        super().__init__(experts.gate_up_weight, experts.down_weight, experts.rule)
        self._weights = weights
        self._places = places

    def gate_up(self, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        out = super().gate_up(expert, x, tokens)
        return add_present(out, x, self._weights.gate_up[expert], self._places[tokens])

    def down(self, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        out = super().down(expert, x, tokens)
        return add_present(out, x, self._weights.down[expert], self._places[tokens])
