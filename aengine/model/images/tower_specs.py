"""The towers of all families as data."""

from __future__ import annotations

from typing import Literal

import msgspec

TowerActivation = Literal["silu", "gelu", "gelu_tanh"]


class QwenTower(msgspec.Struct, frozen=True, kw_only=True, tag="qwen"):
    """Qwen3-VL and Qwen3.5: positions from an interpolated table and from a rotation."""

    layers: int
    hidden: int
    inner: int
    heads: int
    frames: int  # an image is repeated so often, as the frames of a film
    side: int  # of the table of positions, which is a square
    theta: float
    activation: TowerActivation
    out: int  # the hidden size of the decoder
    # Blocks after which the patches are merged once more. The results are added after the decoder's first layers.
    deep: tuple[int, ...] = ()


class SiglipTower(msgspec.Struct, frozen=True, kw_only=True, tag="siglip"):
    """Gemma 3: images of one size, with a table of positions."""

    layers: int
    hidden: int
    inner: int
    heads: int
    side: int  # of the table of positions, and of every image in patches
    eps: float
    activation: TowerActivation
    out: int


class PixtralTower(msgspec.Struct, frozen=True, kw_only=True, tag="pixtral"):
    """Mistral 3: positions from a rotation alone."""

    layers: int
    hidden: int
    inner: int
    heads: int
    theta: float
    activation: TowerActivation
    projection_activation: TowerActivation
    projection_bias: bool
    projection_eps: float
    out: int


class Gemma4Tower(msgspec.Struct, frozen=True, kw_only=True, tag="gemma4"):
    """Gemma 4: tables of columns and of rows, and a rotation of each half of a head."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int  # the length of each table
    theta: float
    eps: float
    clipped: bool  # whether inputs and outputs of linears are clipped
    standardised: bool  # whether embeddings are shifted and scaled before the projection
    out: int


TowerSpec = QwenTower | SiglipTower | PixtralTower | Gemma4Tower
