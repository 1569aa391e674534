"""What blocks call where a model is spread over ranks: products with a rank's shard, and sums over all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.collective.base import Collective
from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear, Norm


class SummedLinear:
    """A linear whose columns are dealt out: every rank multiplies its part of x, and the products are added up.

    Only the first rank's has the bias.
    """

    def __init__(self, linear: Linear, ranks: Collective) -> None:
        self.inputs = linear.inputs
        self.outputs = linear.outputs
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._linear(x))

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._ranks.sum(self._linear(x), residual)

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self._ranks.sum(self._linear.gated(gate_up), residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._ranks.sum(self._linear.gated(gate_up))

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        return self._ranks.sum(self._linear.after(norm, x))


class GatheredLinear:
    """A linear whose rows are dealt out, for what needs the outputs of all of them."""

    def __init__(self, linear: Linear, ranks: Collective, outputs: int) -> None:
        """outputs: of all ranks together."""
        self.inputs = linear.inputs
        self.outputs = outputs
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.gather(self._linear(x), self.outputs)


class SummedExperts:
    """Experts of which every rank has a part: of the columns of each, or some of them whole."""

    def __init__(self, experts: Experts, ranks: Collective, first: int = 0) -> None:
        """first: which expert of the model is the first of this rank's."""
        self.hidden = experts.hidden
        self.experts = experts.experts
        self._experts = experts
        self._ranks = ranks
        self._first = first

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        """ids: of the model's experts."""
        own = ids - self._first if self._first else ids  # one that others have is out of range here
        part = self._experts.add_to(h, own, weights, torch.zeros_like(residual))
        return self._ranks.sum(part, residual)


class Embedding:
    """A table [vocab, hidden] of which every token takes its row."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._table)


class SummedEmbedding:
    """A table whose rows are dealt out: a token's row comes from the rank that has it."""

    def __init__(self, table: Tensor, ranks: Collective) -> None:
        """table [rows of a rank, hidden], the same number on each."""
        self._table = table
        self._first = ranks.index * len(table)
        self._ranks = ranks

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self._first
        elsewhere = (own < 0) | (own >= len(self._table))
        rows = F.embedding(own.masked_fill_(elsewhere, 0), self._table)
        return self._ranks.sum(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))


class SummedNorm:
    """An RMS norm over columns that are dealt out."""

    def __init__(self, weight: Tensor, eps: float, width: int, copies: int, ranks: Collective) -> None:
        """weight [columns of a rank]; width: of all columns; copies: how many ranks have the same ones."""
        self.weight = weight
        self.eps = eps
        self._width = width
        self._copies = copies
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        squares = self._ranks.gather(wide.square().sum(-1, keepdim=True), self._ranks.count)  # [tokens, ranks]
        mean = squares.sum(-1, keepdim=True) / (self._width * self._copies)
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight
