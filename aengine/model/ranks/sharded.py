"""Norms, sums, embeddings and heads of a model that is spread over several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.collective.base import Collective
from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Norm


class PreparedNorm:
    """A norm that is computed in the same launch as the sum over ranks before it."""

    def __init__(self, norm: Norm, ranks: Collective) -> None:
        self.norm = norm
        self.weight = norm.weight
        self.eps = norm.eps
        self.is_rms = norm.is_rms
        self._ranks = ranks
        self._prepared: tuple[Tensor, Tensor] | None = None  # an input and its result

    def prepare(self, x: Tensor, normed: Tensor) -> None:
        """Store the result for x. The next call with this x returns it."""
        self._prepared = x, normed

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x. If the sum over ranks that computes x is still running, finish it first."""
        if self._ranks.pending:
            return self._finish(x)
        prepared, self._prepared = self._prepared, None
        same = prepared is not None and prepared[0].data_ptr() == x.data_ptr() and prepared[0].shape == x.shape
        return prepared[1] if prepared is not None and same else self.norm(x)

    def _finish(self, x: Tensor) -> Tensor:
        normed, at = torch.empty_like(x), 0
        while at < len(x):
            piece = self._ranks.pending[0]
            rows = slice(at, at + piece.tokens)
            piece.finish(x[rows], self.norm, normed[rows])
            at += piece.tokens
        return normed

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(x))


def finish_sums(ranks: Collective, x: Tensor) -> None:
    """Finish the pending sums that compute x [tokens, width]. Does nothing if there are none."""
    at = 0
    while ranks.pending:
        piece = ranks.pending[0]
        piece.finish(x[at : at + piece.tokens])
        at += piece.tokens


class Sum:
    """The sum over all ranks at the end of a block. It may also compute the norm that follows."""

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks
        self.norm: PreparedNorm | None = None

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.norm is None or len(part) == 1:  # the next product norms a single row itself
            return self._ranks.sum(part, residual)
        x, normed = self._ranks.sum_and_norm(part, residual, self.norm.norm)
        self.norm.prepare(x, normed)
        return x

    def add_result(self, part: Callable[[slice], Tensor], residual: Tensor) -> Tensor:
        """Add the sum of all ranks' results to the residual, which may be overwritten.

        part: returns this rank's result for a slice of the tokens, [tokens, width]. For many tokens, the sum may still
            be running when this method returns. The next norm finishes it.
        """
        pieces = self._ranks.pieces(len(residual))
        if len(pieces) == 1:
            return self(part(pieces[0]), residual)
        begun = [self._ranks.begin_sum(part(rows), residual[rows]) for rows in pieces]
        if self.norm is None:
            for rows, one in zip(pieces, begun):
                one.finish(residual[rows])
        return residual


class OffsetExperts:
    """The experts of one rank, called with expert ids of the whole model."""

    def __init__(self, experts: Experts, first: int) -> None:
        """first: the id of this rank's first expert in the whole model."""
        self.hidden = experts.hidden
        self.experts = experts.experts
        self._experts = experts
        self._first = first

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """Like `Experts.add_to`, with ids of the whole model. Other ranks' experts are out of range and add nothing."""
        return self._experts.add_to(h, ids - self._first, weights, residual)


class Embedding:
    """A table [vocab, hidden] with a row for each token."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._table)


class SummedEmbedding:
    """A table whose rows are divided among ranks. A token's row comes from the rank that has it."""

    def __init__(self, table: Tensor, first: int, total: Sum) -> None:
        """table: [rows of this rank, hidden]. first: the token of its first row."""
        self._table = table
        self._first = first
        self._sum = total

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self._first
        elsewhere = (own < 0) | (own >= len(self._table))
        rows = F.embedding(own.masked_fill_(elsewhere, 0), self._table)
        return self._sum(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))


class SummedNorm:
    """An RMS norm over columns that are divided among ranks."""

    is_rms = True

    def __init__(self, weight: Tensor, eps: float, width: int, copies: int, ranks: Collective) -> None:
        """weight: [columns of this rank]. width: all columns. copies: how many ranks have the same columns."""
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

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(x))
