"""DFlash heads as data."""

from __future__ import annotations

from aengine.model.families.heads import HeadSpec


class DFlashSpec(HeadSpec, frozen=True, kw_only=True, tag="dflash"):
    """A DFlash head for one target. It drafts all tokens of a block at once."""

    block_size: int  # tokens of a block: the last drawn one and the drafts after it
    mask_id: int  # the token that stands for each draft of a block
    is_causal: bool = False  # whether a token of a block sees only the block's tokens up to itself
