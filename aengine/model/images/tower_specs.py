"""The towers of all families as data."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

TowerActivation = Literal["silu", "gelu", "gelu_tanh"]


class _Tower(msgspec.Struct, frozen=True, kw_only=True):
    """What all towers have."""

    layers: int
    hidden: int
    inner: int
    heads: int
    out: int  # the hidden size of the decoder

    matrices: ClassVar[int] = 2  # of an MLP

    @property
    def weights(self) -> int:
        """Estimate the number of weights: those of the layers."""
        return self.layers * self.hidden * (4 * self.hidden + self.matrices * self.inner)

    @property
    def width(self) -> int:
        """The number of values that the tower computes of each token."""
        return self.out

    @property
    def rehearsed(self) -> int:
        """The number of blocks that a rehearsal computes."""
        return 1


class QwenTower(_Tower, frozen=True, kw_only=True, tag="qwen"):
    """Qwen3-VL and Qwen3.5: positions from an interpolated table and from a rotation."""

    frames: int  # an image is repeated so often, as the frames of a film
    side: int  # of the table of positions, which is a square
    theta: float
    activation: TowerActivation
    # Blocks after which the patches are merged once more. The results are added after the decoder's first layers.
    deep: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return self.out * (1 + len(self.deep))

    @property
    def rehearsed(self) -> int:
        return len({0, *self.deep})


class SiglipTower(_Tower, frozen=True, kw_only=True, tag="siglip"):
    """Gemma 3: images of one size, with a table of positions."""

    side: int  # of the table of positions, and of every image in patches
    eps: float
    activation: TowerActivation


class PixtralTower(_Tower, frozen=True, kw_only=True, tag="pixtral"):
    """Mistral 3: positions from a rotation alone."""

    matrices: ClassVar[int] = 3
    theta: float
    activation: TowerActivation
    projection_activation: TowerActivation
    projection_bias: bool
    projection_eps: float


class Gemma4Tower(_Tower, frozen=True, kw_only=True, tag="gemma4"):
    """Gemma 4: tables of columns and of rows, and a rotation of each half of a head."""

    matrices: ClassVar[int] = 3
    kv_heads: int
    head_dim: int
    positions: int  # the length of each table
    theta: float
    eps: float
    clipped: bool  # whether inputs and outputs of linears are clipped
    standardised: bool  # whether embeddings are shifted and scaled before the projection


TowerSpec = QwenTower | SiglipTower | PixtralTower | Gemma4Tower
