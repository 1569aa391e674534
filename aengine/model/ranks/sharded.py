"""What blocks call where a model is spread over ranks: products with a rank's shard, and sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.collective.base import Collective
from aengine.kernels.collective.config import OVERLAPPED_ROWS
from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.lora.base import TokenAdapters


class PreparedNorm:
    """A norm whose result the sum in front of it has computed as well, in one launch."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm
        self.weight = norm.weight
        self.eps = norm.eps
        self._prepared: tuple[Tensor, Tensor] | None = None  # of what, and the result

    def prepare(self, x: Tensor, normed: Tensor) -> None:
        """The next call with this very x gives `normed`."""
        self._prepared = x, normed

    def __call__(self, x: Tensor) -> Tensor:
        prepared, self._prepared = self._prepared, None
        return self.norm(x) if prepared is None or prepared[0] is not x else prepared[1]


class Sum:
    """The sum over all ranks that ends a block, with the norm that begins the next one."""

    def __init__(self, ranks: Collective, tokens: TokenAdapters | None = None) -> None:
        """tokens: whose adapters products look at, those of all rows at once; None: there are no adapters."""
        self._ranks = ranks
        self._tokens = tokens
        self.norm: PreparedNorm | None = None

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.norm is None or len(part) == 1:  # a single row is normed by the product that follows
            return self._ranks.sum(part, residual)
        x, normed = self._ranks.sum_and_norm(part, residual, self.norm.norm)
        self.norm.prepare(x, normed)
        return x

    def of(self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor) -> Tensor:
        """The sum of `product(x)`; of many tokens, beside the product itself."""
        if len(x) < OVERLAPPED_ROWS or (self._tokens is not None and self._tokens.places is not None):
            return self(product(x), residual)
        return self._ranks.sum_product(product, x, residual)


class SummedLinear:
    """A linear whose columns are dealt out: every rank multiplies its part of x, and the products are added up.

    Only the first rank's has the bias.
    """

    def __init__(self, linear: Linear, total: Sum) -> None:
        self.inputs = linear.inputs
        self.outputs = linear.outputs
        self._linear = linear
        self._sum = total

    def __call__(self, x: Tensor) -> Tensor:
        return self._sum(self._linear(x))

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._sum.of(self._linear, x, residual)

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self._sum.of(self._linear.gated, gate_up, residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._sum(self._linear.gated(gate_up))

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        return self._sum(self._linear.after(norm, x))


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


class SomeExperts:
    """The experts of a model from one of them on, as many as a rank has."""

    def __init__(self, experts: Experts, first: int) -> None:
        """first: which expert of the model is the first of this rank's."""
        self.hidden = experts.hidden
        self.experts = experts.experts
        self._experts = experts
        self._first = first

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """ids: of the model's experts. One that others have is out of range here, and adds nothing."""
        return self._experts.add_to(h, ids - self._first, weights, residual)


class Embedding:
    """A table [vocab, hidden] of which every token takes its row."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._table)


class SummedEmbedding:
    """A table whose rows are dealt out: a token's row comes from the rank that has it."""

    def __init__(self, table: Tensor, first: int, total: Sum) -> None:
        """table [rows of a rank, hidden]; first: the token of its first row."""
        self._table = table
        self._first = first
        self._sum = total

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self._first
        elsewhere = (own < 0) | (own >= len(self._table))
        rows = F.embedding(own.masked_fill_(elsewhere, 0), self._table)
        return self._sum(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))


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
