"""Draft heads, which are published in folders of their own, as data: EAGLE-3, P-EAGLE and DFlash."""

from __future__ import annotations

import msgspec
import torch

from aengine.cache.kv import KVLayer
from aengine.model.ranks.shard import Shard
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.layer import LayerSpec


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that draft heads of all kinds have. A head is made for one target."""

    hidden_size: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]  # the layers of the target before which its states are taken, ascending
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int  # the number of tokens that can be drafted
    has_embedding: bool = False  # whether the files have an embedding. If not, the target's is used.
    has_head: bool = True  # whether the files have an output matrix. If not, the target's is used.
    is_mapped: bool = False  # whether the files say which token of the target each token of the head is

    @property
    def drafts_blocks(self) -> bool:
        """Whether several drafts of a row are made in one run."""
        return False

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, AttentionSpec))

    def spread_over(self, ranks: int) -> int:
        """Return over how many of the target's ranks the head is spread.

        Returns 1 if its layers cannot be divided evenly. Then each rank has the whole head.
        """
        return 1 if any(layer.indivisible(ranks) for layer in self.layers) else ranks

    def kv_layers(self, ranks: int) -> tuple[KVLayer, ...]:
        """Return what each layer keeps of a token in the KV pool of a rank. ranks: of the target."""
        return tuple(attention.kv_layer(self.spread_over(ranks)) for attention in self.attention)

    def linears(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each product between embedding and output matrix. ranks: of the target."""
        hidden, spread = self.hidden_size, self.spread_over(ranks)
        of_layers = (linear for layer in self.layers for linear in layer.linears(hidden, spread))
        return (hidden, len(self.taps) * self.target_hidden_size), *of_layers

    def weight_bytes(self, dtype: torch.dtype, ranks: int) -> int:
        """Estimate the bytes of its weights on each rank. ranks: of the target."""
        return self.parameters // self.spread_over(ranks) * dtype.itemsize

    @property
    def parameters(self) -> int:
        """The number of weights in matrices, without those that are the target's."""
        tables = self.has_embedding * self.target_vocab_size + self.has_head * self.draft_vocab_size
        return sum(n * k for n, k in self.linears(1)) + tables * self.hidden_size


class Eagle3Spec(HeadSpec, frozen=True, kw_only=True, tag="eagle3"):
    """An EAGLE-3 or P-EAGLE head for one target."""

    norm_before_residual: bool  # whether the first residual is the normed state
    norm_before_fc: bool  # whether one norm is applied to the concatenated states of the target
    fc_norm: bool  # whether the states of each layer of the target have a norm of their own
    norm_output: bool  # whether the states of the next run are taken after the last norm
    # The token that stands for each draft after the first, if all of them are made in one run. None: each has a run.
    mask_id: int | None = None
    first_layer: str = "midlayer"  # the first layer's name in checkpoints; later layers are layers.1, layers.2, ...

    @property
    def drafts_blocks(self) -> bool:
        return self.mask_id is not None

    def linears(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """See `HeadSpec.linears`. The first layer reads an embedding and a state, side by side."""
        join, first, *others = super().linears(ranks)
        return join, (first[0], 2 * self.hidden_size), *others


class DFlashSpec(HeadSpec, frozen=True, kw_only=True, tag="dflash"):
    """A DFlash head for one target. It drafts all tokens of a block at once."""

    block_size: int  # tokens of a block: the last drawn one and the drafts after it
    mask_id: int  # the token that stands for each draft of a block
    is_causal: bool = False  # whether a token of a block sees only the block's tokens up to itself

    @property
    def drafts_blocks(self) -> bool:
        return True

    def linears(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """See `HeadSpec.linears`. Queries have a projection of their own, because the target's states have none."""
        spread, found = Shard(count=self.spread_over(ranks)), [super().linears(ranks)[0]]
        for layer, attention in zip(self.layers, self.attention):
            (width, hidden), *others = layer.linears(self.hidden_size, spread.count)
            keys = 2 * spread.units(attention.kv_heads) * attention.head_dim
            found += [(width - keys, hidden), (keys, hidden), *others]
        return tuple(found)
