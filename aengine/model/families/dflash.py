"""DFlash heads as data."""

from __future__ import annotations

from aengine.model.families.heads import HeadSpec
from aengine.model.ranks.shard import Shard


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
