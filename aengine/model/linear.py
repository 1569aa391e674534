"""Linears and experts whose weights come from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.registered import RegisteredExperts, RegisteredLinear
from aengine.model.overwrite import captured, overwrite


class LoadedLinear:
    """A linear that stands in its block from the beginning, and computes once the checkpoint's tensors are there.

    Until then there is nothing to compute with: raises AttributeError.
    """

    loaded: Linear  # what its format made of the tensors
    _made: RegisteredLinear | None = None  # the same without adapters

    def __init__(self, inputs: int, outputs: int, adapt: Callable[[Linear], Linear] | None = None) -> None:
        """adapt: makes what computes of what the format made; None: that computes itself."""
        self.inputs = inputs
        self.outputs = outputs
        self._adapt = adapt

    @property
    def unadapted(self) -> Linear | None:
        """What computes where no token has an adapter; None until it is loaded."""
        return self._made

    def load(self, made: RegisteredLinear) -> None:
        """The tensors are there, and this is what their format made of them.

        Where there were others, on a GPU, their memory gets the new numbers: graphs have captured it. Raises
        `WeightsError` where these do not fit there.
        """
        if self._made is not None and captured(self._made):
            overwrite(self._made, made)
            return
        self._made = made
        self.loaded = made if self._adapt is None else self._adapt(made)

    def __call__(self, x: Tensor) -> Tensor:
        return self.loaded(x)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.loaded.add_to(x, residual)

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self.loaded.add_gated_to(gate_up, residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self.loaded.gated(gate_up)

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        return self.loaded.after(norm, x)

    def activated(self, norm: Norm | None, x: Tensor) -> Tensor | None:
        return self.loaded.activated(norm, x)


class LoadedExperts:
    """The same for the experts of a layer."""

    loaded: Experts
    _made: RegisteredExperts | None = None

    def __init__(self, experts: int, hidden: int, adapt: Callable[[Experts], Experts] | None = None) -> None:
        self.experts = experts
        self.hidden = hidden
        self._adapt = adapt

    @property
    def unadapted(self) -> Experts | None:
        return self._made

    def load(self, made: RegisteredExperts) -> None:
        if self._made is not None and captured(self._made):
            overwrite(self._made, made)
            return
        self._made = made
        self.loaded = made if self._adapt is None else self._adapt(made)

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        return self.loaded.add_to(h, ids, weights, residual)
