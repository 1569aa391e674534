"""EAGLE-3 and P-EAGLE heads as data."""

from __future__ import annotations

from aengine.model.families.heads import HeadSpec


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
