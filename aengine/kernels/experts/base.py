"""What a block of the decoder needs of a mixture of experts, and what the driver needs of a format of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import Launch
from aengine.kernels.linear.base import Registered

if TYPE_CHECKING:  # it imports Triton, which a CPU does not need
    from aengine.kernels.experts.routing.plan import Plan


class Experts(Protocol):
    """The weighted sum of down(activation(gate(h)) * up(h)) of each token's experts, or of down(activation(up(h))).

    They own their weights.
    """

    @property
    def hidden(self) -> int: ...

    @property
    def experts(self) -> int:
        """The number of experts."""
        ...

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """Return residual + the sum over j of weights[t, j] * the expert ids[t, j] of h: [tokens, hidden].

        The sum over j is in order and in float32. On a GPU this only enqueues.

        Args:
            h: [tokens, hidden].
            ids: int32 [tokens, k]. An id outside of 0..experts-1 adds nothing.
            weights: float32 [tokens, k].
            residual: [tokens, hidden]. It may be overwritten. None means zeros.
        """
        ...


class RegisteredExperts(Experts, Registered, Protocol):
    """Experts that own their weights."""


class ExpertPass(Protocol):
    """The products of one pass of tokens, called one after the other. A row is a pair of a token and one of its
    experts.
    """

    @property
    def plan(self) -> Plan: ...

    @property
    def sorted(self) -> bool:
        """Whether rows are in the order of `plan.order`; otherwise they are in the order of the pairs."""
        ...

    def activated(self) -> Tensor:
        """Return the input of down, as the rule says: [pairs, inter], or in an order that only `down` reads."""
        ...

    def gate_up(self) -> Tensor:
        """Return gate and up with their biases, gate first: [pairs, 2 * inter]; or up alone: [pairs, inter]."""
        ...

    def down(self, inner: Tensor) -> Tensor:
        """inner, of `activated` or [pairs, inter], which this may overwrite -> [pairs, hidden], with the bias."""
        ...


class TileConfig(Protocol):
    """How tiles of rows are computed."""

    @property
    def height(self) -> int:
        """The most rows of a tile."""
        ...


Single = TypeVar("Single")
Tiles = TypeVar("Tiles", bound=TileConfig)


class ExpertProducts(Protocol[Single, Tiles]):
    """The matrices of all experts in one format, and its kernels.

    Single and Tiles are the configs of the kernels for single rows and for tiles of rows.
    """

    @property
    def experts(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def gate_up(self) -> object:
        """The matrices [experts, 2 * inter, hidden], gate's rows first, or up's [experts, inter, hidden]."""
        ...

    @property
    def down(self) -> object:
        """The matrices [experts, hidden, inter]."""
        ...

    @property
    def rule(self) -> ExpertRule: ...

    def single_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> Single | None:
        """Return how to compute this number of tokens pair by pair; None if tiles are faster. dtype: of the tokens."""
        ...

    def tile_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> Tiles: ...

    def single_rows(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, config: Single) -> Tensor:
        """Compute `Experts.add_to` of contiguous tensors."""
        ...

    def begin(self, h: Tensor, ids: Tensor, plan: Plan, config: Tiles) -> ExpertPass:
        """Return the pass of h [tokens, hidden] with ids [tokens, k], both contiguous, sorted by `plan`."""
        ...
