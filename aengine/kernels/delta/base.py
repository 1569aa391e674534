"""A gated delta net: what it is made of, what it keeps of a sequence, and a step as it sees it.

Every value head has a matrix S [key_dim, value_dim]. A token forgets by a factor, exp(g), corrects what S answers to
its key by beta, and asks with its query:

    S = exp(g) * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q
    g = -exp(a_log) * softplus(a + dt_bias);  beta = sigmoid(b)

q, k and v come through a causal convolution of each channel and SiLU; q and k have length 1, q is then divided by
sqrt(key_dim); and o leaves as weight * rms_norm(o) * silu(z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

P = TypeVar("P")

BLOCK = 64  # tokens that chunks compute at once, by their positions: 0 to 63, 64 to 127, ...


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Value head h reads key head h // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """The width of all key heads, which is that of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, then k, then v."""
        return 2 * self.keys + self.values


@dataclass(slots=True)
class DeltaWeights:
    """The tensors of a layer between its projections; all may be filled later."""

    heads: DeltaHeads
    conv: Tensor  # [channels, width]: the last one belongs to the token itself
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float


@dataclass(slots=True)
class DeltaState:
    """What a layer keeps of sequences, in slots. Slots that nobody wrote may hold anything.

    A slot lies contiguous within each tensor; slots may lie apart.
    """

    conv: Tensor  # [slots, width, channels] in the model's dtype: the input of position p is in row p % width
    recurrence: Tensor  # [slots, value_heads, key_dim, value_dim] float32 or bfloat16: S


@dataclass(slots=True)
class StateBatch:
    """A step as layers with a state see it: first the decodes, of which the i-th has token i, then the chunks.

    Slot 0 belongs to nobody and is neither read nor written. Every other slot is written at most once a step, and one
    that a sequence begins with and does not end in is written by nobody.
    """

    # [decodes + chunks] int32: where each one's state goes. 0: padding, whose results are zero. -1: a decode that there
    # is not, whose token belongs to a chunk; they come last among the decodes.
    slots: Tensor
    sources: Tensor  # [decodes + chunks] int32: where the state before the step is; 0: it begins at zero
    starts: (
        Tensor  # [chunks + 1] int32: the token each chunk begins with, and where the last one ends; some may be empty
    )
    positions: Tensor  # [tokens] int64: of each token in its sequence; of padding anything
    # [tokens] int32: a slot that gets the state after this token too; 0: none. Of a chunk only tokens whose next
    # position is a multiple of BLOCK have one, and its last one.
    saves: Tensor
    num_decodes: int
    # What kernels work out once a step, for all layers: by what it is. A step that reuses this object with other
    # tensors clears it.
    plans: dict[type, object] = field(default_factory=dict)

    @property
    def num_chunks(self) -> int:
        return len(self.starts) - 1

    def plan(self, kind: type[P], make: Callable[[], P]) -> P:
        """The plan of this kind, made by the first layer that asks."""
        known = self.plans.get(kind)
        if not isinstance(known, kind):
            self.plans[kind] = known = make()
        return known


class DeltaNet(Protocol):
    """What lies between the projections of a layer: convolution, gates, recurrence and norm."""

    def __call__(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: DeltaState, batch: StateBatch) -> Tensor:
        """qkv [tokens, channels], z [tokens, values], b, a [tokens, value_heads], one dtype -> [tokens, values].

        The state is updated in place. Rows of the inputs are contiguous, and may lie apart.
        """
        ...
