"""The heads and the states of recurrent layers, and the batch of a step.

A recurrent layer keeps the last inputs of a convolution. Most also keep a matrix S [key_dim, value_dim] for each value
head. A token fades the matrix and adds a product to it:

    S = exp(g) * S + key correction^T

Layers differ in how a token gives g, key and correction. A layer with short convolutions only has no matrix.

Drafts: a decoding row computes the token that it drew last, and then drafts, some of which may be refused. The state
in its slot contains the first of these tokens only. For each draft the step keeps what the draft adds to the state: its
key, its correction and g. The next step first adds those of the accepted drafts. So a step reads and writes each state
once, with any number of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from aengine.kernels.launch import power_of_two

P = TypeVar("P")

BLOCK = 64  # tokens of a block of a chunk, by position: 0 to 63, 64 to 127, ...
# Arguments of kernels that are slices of a batch with any alignment. They are read one number at a time. So no variant
# is compiled for their alignment.
_PER_STEP = "slots", "sources", "starts", "positions", "saves", "read", "save_after", "save_slots"
UNALIGNED = [f"{name}_ptr" for name in (*_PER_STEP, "block_starts", "block_tokens")]


@dataclass(frozen=True, slots=True)
class RecurrentHeads:
    """Value head h reads key head h // (value_heads / key_heads), and has a state [key_dim, value_dim]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """The width of all key heads, and of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution, which queries, keys and values pass."""
        return 2 * self.keys + self.values


def decode_warps(heads: RecurrentHeads) -> int:
    """Return the number of warps of a program that decodes a head. Each thread holds 128 elements of its state."""
    return max(1, power_of_two(heads.key_dim) * power_of_two(heads.value_dim) // (128 * 32))


@dataclass(slots=True)
class DraftUpdates:
    """What the drafts of each row add to a layer's state. It is indexed by the row's slot, and by the draft's position
    modulo `entries`. Each slot is contiguous in each tensor.
    """

    inputs: Tensor  # [slots of rows, entries, channels] in the model's dtype: inputs of the convolution
    keys: Tensor  # [slots of rows, entries, key_heads, key_dim] float32
    corrections: Tensor  # [slots of rows, entries, value_heads, value_dim] float32
    decays: Tensor  # [slots of rows, entries, value_heads] float32: g

    @property
    def entries(self) -> int:
        """2 * n + 1 for n drafts: a program may write new ones while another still reads accepted ones."""
        return self.inputs.shape[1]


@dataclass(slots=True)
class RecurrentState:
    """The state of a layer for all sequences, in slots. Slots that were never written may hold any values.

    Each slot is contiguous in each tensor. Slots need not be adjacent.
    """

    conv: Tensor  # [slots, width, channels] in the model's dtype: row p % width holds the input of position p
    recurrence: Tensor  # [slots, value_heads, key_dim, value_dim] float32 or bfloat16: S
    drafts: DraftUpdates | None = None  # None: no step verifies drafts


@dataclass(slots=True)
class DraftedBatch:
    """The part of a batch that only models with drafts need. Every tensor is [decodes + chunks].

    A sequence that decodes is a decode or, if it has drafts, a chunk. It starts and ends in the slot of its row.
    """

    # int64: how many tokens the state before the step contains. The tokens from there to the sequence's first one are
    # accepted drafts. -1: the sequence is a chunk of a prompt, whose state contains all tokens before it.
    read: Tensor
    # At most one state of each decoding sequence is saved: after its first `save_after` tokens, counted from its
    # beginning, if the step adds that token to the state. This may be a draft.
    save_after: Tensor  # int64
    save_slots: Tensor  # int32; 0: none
    # False: no sequence is a chunk of a prompt. A sequence with slot 0 and `read` >= 0 is padding, decode or chunk.
    has_prompts: bool = True


@dataclass(slots=True)
class StateBatch:
    """The batch of a step for layers with a state: first the decodes, whose i-th has token i, then the chunks.

    Slot 0 is never read or written. Every other slot is written at most once a step. If a sequence starts from one slot
    and ends in another, the first is not written.
    """

    # [decodes + chunks] int32: the slot for each new state. 0: padding, whose results are zero. -1: an unused decode,
    # whose token belongs to a chunk. Unused decodes come last among the decodes.
    slots: Tensor
    sources: Tensor  # [decodes + chunks] int32: the slot of each state before the step; 0: it starts from zero
    starts: Tensor  # [chunks + 1] int32: each chunk's first token, and the end of the last chunk; chunks may be empty
    positions: Tensor  # [tokens] int64: position of each token in its sequence; any number for padding
    # [tokens] int32: one more slot to which the state after this token is written; 0: none. In a chunk only tokens
    # before a multiple of BLOCK, and the last token, may have one.
    saves: Tensor
    num_decodes: int
    drafted: DraftedBatch | None = None  # None: no step verifies drafts
    # What kernels compute once a step for all layers, by type. Clear it before reusing this object with other tensors.
    plans: dict[type, object] = field(default_factory=dict)

    @property
    def num_chunks(self) -> int:
        return len(self.starts) - 1

    def prompts(self) -> StateBatch:
        """Return the batch in which chunks of decoding sequences are padding."""
        if self.drafted is None:
            return self
        return replace(self, slots=self.slots.masked_fill(self.drafted.read >= 0, 0), drafted=None, plans={})

    def plan(self, kind: type[P], make: Callable[[], P]) -> P:
        """Return the plan of this kind. The first layer makes it."""
        known = self.plans.get(kind)
        if not isinstance(known, kind):
            self.plans[kind] = known = make()
        return known
