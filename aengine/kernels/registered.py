"""What linears and experts keep of their weights, by name: a reload writes other numbers to the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear


@runtime_checkable
class Registered(Protocol):
    """An object made of a weight that a checkpoint holds."""

    @property
    def parameters(self) -> Mapping[str, object]:
        """Everything that was made of the weight: tensors, which a reload overwrites, and constants, which it keeps.

        A value may also be another `Registered`, a dataclass, or a list of such values. Memory that is only used while
        a product is computed is left out, as is what other objects register.
        """
        ...


class RegisteredLinear(Linear, Registered, Protocol):
    """A linear that owns its weight."""


class RegisteredExperts(Experts, Registered, Protocol):
    """Experts that own their weights."""
