"""Rotary position embeddings: the frequencies of each scaling scheme, and the tables that kernels read."""

from __future__ import annotations

import math

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
# Like `default` within max_position_embeddings (dynamic), and for text (mrope). `alpha` makes dynamic another scheme.
_PLAIN_IN_REACH = ("dynamic", "mrope")
_OTHER_NAMES = {"su": "longrope"}  # in the first files of Phi-3
MAX_POSITIONS = 2**26  # more than any real model has, and small enough that no size overflows


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A scaling scheme and its parameters. Parameters of other schemes have no effect."""

    theta: float = 10_000.0
    part: float = 1.0  # the share of a head's dimensions that is rotated, from the first on; proportional: of all pairs
    type: str = "default"
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn and longrope: the trained context in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the corrected range to whole dimensions
    attention_factor: float = 1.0  # yarn and longrope: scales cosines and sines
    short_factors: tuple[float, ...] = ()  # longrope: divide the frequencies of sequences in the trained context
    long_factors: tuple[float, ...] = ()  # longrope: divide the frequencies of longer sequences

    @property
    def reach(self) -> int:
        """The number of positions that yarn makes usable. 0 for other schemes."""
        return int(self.original_positions * self.factor) if self.type == "yarn" else 0

    def needs_long_factors(self, max_positions: int) -> bool:
        """Return whether longrope uses its long factors for a limit of this many positions."""
        return self.type == "longrope" and max_positions > self.original_positions

    def rotated(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return head_dim if self.type == "proportional" else int(head_dim * self.part)


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """A factor of queries that grows with their position p: 1 + beta * ln(1 + floor((p + shift) / positions))."""

    beta: float
    positions: int
    shift: int = 0


def read_rope(
    config: Fields,
    *,
    head_dim: int,
    section: Fields | None = None,
    partial: bool = False,
    part: float = 1.0,
    theta: float = 10_000.0,
) -> RopeConfig:
    """Read the rotary embedding's settings from config.json.

    Newer files have a section rope_parameters, older files rope_scaling and rope_theta. If a file has both, the older
    keys are used, as in transformers.

    Args:
        section: Read this section instead.
        partial: Whether the family may rotate only a part of each head.
        part, theta: Defaults for keys that the file leaves out.

    Raises `UnsupportedModelError` for a scheme that is not in `ROPE_TYPES`, and `CheckpointError` for values out of
    range.
    """
    section = section or config.section("rope_scaling") or config.section("rope_parameters")
    fields = section if section is not None else Fields({}, config.source)
    positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    kind = fields.text("rope_type", fields.text("type", "default"))
    kind = _OTHER_NAMES.get(kind, kind)
    if kind in _PLAIN_IN_REACH and not fields.present("alpha"):
        kind = "default"
    if kind not in ROPE_TYPES:
        known = ", ".join((*ROPE_TYPES, *_PLAIN_IN_REACH))
        raise UnsupportedModelError(f"{config.source}: rope type {shown(kind)} is not supported; supported are {known}")
    part = fields.number("partial_rotary_factor", 0, 1, config.number("partial_rotary_factor", 0, 1, part))
    if part != 1.0 and not partial and kind != "proportional":
        raise UnsupportedModelError(f"{fields.source}: partial_rotary_factor other than 1 is not supported")
    theta = (fields if fields.present("rope_theta") else config).number("rope_theta", 1.0, 1e15, theta)
    rope = RopeConfig(theta=theta, part=part)
    if kind == "proportional":
        return replace(rope, type=kind, factor=fields.number("factor", 1e-6, 1e6, 1.0))
    if rope.rotated(head_dim) % 2:
        raise fields.fail("partial_rotary_factor", f"makes {rope.rotated(head_dim)} rotated dimensions, which are odd")
    if kind == "default":
        return rope
    outer = config.present("original_max_position_embeddings")
    at = config if outer else fields
    if kind == "longrope":
        return _read_longrope(
            rope, fields, at.integer("original_max_position_embeddings", 1, MAX_POSITIONS), positions, head_dim
        )
    factor = fields.number("factor", 1e-6, 1e6)
    if kind == "linear":
        return replace(rope, type=kind, factor=factor)
    original = at.integer("original_max_position_embeddings", 1, MAX_POSITIONS, positions)
    if kind == "llama3":
        low = fields.number("low_freq_factor", 1e-6, 1e6)
        high = fields.number("high_freq_factor", 1e-6, 1e6)
        if high < low:
            raise fields.fail("high_freq_factor", f"({high:g}) must not be below low_freq_factor ({low:g})")
        return replace(
            rope, type=kind, factor=factor, original_positions=original, low_freq_factor=low, high_freq_factor=high
        )
    if theta == 1.0:
        raise fields.fail("rope_theta", "must be above 1 for yarn")
    return replace(
        rope,
        type=kind,
        factor=factor,
        original_positions=original,
        beta_fast=fields.number("beta_fast", 0, 1e6, 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 0, 1e6, 1.0) or 1.0,
        truncate=fields.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def yarn_score_factor(config: Fields) -> float:
    """Return the factor of attention scores that follows from yarn's mscale_all_dim (DeepSeek)."""
    fields = config.section("rope_scaling") or config.section("rope_parameters")
    if fields is None or fields.text("rope_type", fields.text("type", "default")) == "default":
        return 1.0
    weight = fields.number("mscale_all_dim", 0, 1e3, 0.0)
    return _yarn_growth(fields.number("factor", 1e-6, 1e6), weight) if weight else 1.0


def _read_longrope(rope: RopeConfig, fields: Fields, original: int, positions: int, head_dim: int) -> RopeConfig:
    """Read longrope's settings. The default of the attention factor follows from the growth of the context."""
    factor = fields.number("factor", 1e-6, 1e6, positions / original)
    growth = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    pairs = rope.rotated(head_dim) // 2
    return replace(
        rope,
        type="longrope",
        factor=factor,
        original_positions=original,
        attention_factor=fields.number("attention_factor", 0, 1e3, growth),
        short_factors=fields.numbers("short_factor", pairs, 1e-6, 1e6),
        long_factors=fields.numbers("long_factor", pairs, 1e-6, 1e6),
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """Return the file's attention factor. Its default follows from the growth of the context."""
    if fields.present("attention_factor"):
        return fields.number("attention_factor", 0, 1e3)
    mscale, mscale_all_dim = (fields.number(key, 0, 1e3, 0.0) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return _yarn_growth(factor, mscale) / _yarn_growth(factor, mscale_all_dim)
    return _yarn_growth(factor, 1.0)


def _yarn_growth(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class PositionTables:
    """Tables of values that depend only on the position. Layers with the same settings share a table."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self.max_positions = max_positions
        self.device = device
        self._ropes: dict[tuple[RopeConfig | None, int], Tensor] = {}
        self._growths: dict[QueryGrowth, Tensor] = {}

    def rope(self, rope: RopeConfig | None, head_dim: int) -> Tensor:
        """Return the table of `rope_table`. If `rope` is None, it has no columns."""
        if (rope, head_dim) not in self._ropes:
            self._ropes[rope, head_dim] = (
                torch.empty(self.max_positions, 0, device=self.device)
                if rope is None
                else rope_table(rope, head_dim, self.max_positions, self.device)
            )
        return self._ropes[rope, head_dim]

    @property
    def length(self) -> int:
        """The number of rows of every table: positions, and with longrope those of the trained context again."""
        return min((len(table) for table in self._ropes.values()), default=self.max_positions)

    def growth(self, growth: QueryGrowth) -> Tensor:
        """Return the factor of queries at each position: [max_positions] float32."""
        if growth not in self._growths:
            if self.device.type == "meta":
                return torch.empty(self.max_positions, device=self.device)
            position = torch.arange(self.max_positions, device=self.device)
            periods = torch.floor((position + growth.shift) / growth.positions)
            self._growths[growth] = 1 + growth.beta * torch.log(1 + periods)
        return self._growths[growth]


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Return the cosines, then the sines, of rotated / 2 angles for each position: [max_positions, rotated] float32.

    If longrope uses its long factors, more rows follow, with the short factors for positions of the trained context.
    Row max_positions + p is for position p.
    """
    rotated, far = rope.rotated(head_dim), rope.needs_long_factors(max_positions)
    if device.type == "meta":  # only the shape matters; on meta, torch.arange imports torch's compiler for seconds
        length = max_positions + (rope.original_positions if far else 0)
        return torch.empty(length, rotated, dtype=torch.float32, device=device)

    def rows(count: int, far: bool) -> Tensor:
        frequencies = inverse_frequencies(rope, rotated, far).to(device)
        angles = torch.arange(count, dtype=torch.float32, device=device).unsqueeze(1) * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)

    table = rows(max_positions, far)
    return torch.cat((table, rows(rope.original_positions, far=False))) if far else table


def inverse_frequencies(rope: RopeConfig, rotated: int, far: bool = False) -> Tensor:
    """Return the radians per position of each rotated pair: [rotated / 2] float32.

    They are computed on the CPU, so that all devices have the same values. far: use longrope's long factors.
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "proportional":  # the slow pairs are not rotated
        plain[int(rope.part * rotated // 2) :] = 0.0
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    if rope.type == "yarn":
        return _yarn(rope, plain, rotated)
    if rope.type == "longrope":
        factors = rope.long_factors if far else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend the others by their wavelength.

    If both factors are equal (Llama 4), no frequency is between them: the quotient is infinite, and clamped to 0 or 1.
    """
    turns = rope.original_positions * plain / (2 * math.pi)  # full rotations within the trained context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeConfig, plain: Tensor, rotated: int) -> Tensor:
    """Like `_llama3`, but blend linearly over the dimensions between two rotation counts."""

    def dimension(turns: float) -> float:  # the pair that makes this number of turns within the trained context
        return rotated * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001  # the ramp is a step then
    stretch = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def rotate_by_axes(table: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """Return a table with one row for each token, for tokens with several positions.

    A kernel that reads row i of it for token i rotates each frequency by the position that belongs to the frequency.

    Args:
        table: Of `rope_table`, [max_positions, rotated].
        positions: [axes, tokens] int64.
        axes: [rotated / 2] int64, the row of `positions` for each frequency.

    Returns: [tokens, rotated] float32.
    """
    rows = positions.index_select(0, axes)  # [rotated / 2, tokens]
    return table.gather(0, torch.cat((rows, rows)).T)
