"""Rotary position embeddings: the frequencies of each scaling scheme, and the table that the kernels read."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A scaling scheme and its parameters; those of other schemes keep their defaults and mean nothing."""

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_positions: int = 0  # trained context: llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the corrected range to whole dimensions
    attention_factor: float = 1.0  # yarn: scales cosines and sines


def read_rope(config: Fields, positions: int, most: int) -> tuple[RopeConfig, int]:
    """The rope section of config.json and the positions that it makes usable, out of `positions` and at most `most`.

    It is called rope_parameters now and was rope_scaling beside a rope_theta before; where both are
    there the older one wins, as it does in transformers. Raises `UnsupportedModelError` for a scheme that
    is not one of `ROPE_TYPES`.
    """
    section = config.section("rope_scaling") or config.section("rope_parameters")
    fields = section if section is not None else Fields({}, config.source)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind not in ROPE_TYPES:
        why = "; it depends on the current length, so its KV cannot be cached" if kind == "dynamic" else ""
        raise UnsupportedModelError(
            f"{config.source}: rope type {shown(kind)} is not supported{why}; supported are {', '.join(ROPE_TYPES)}"
        )
    if fields.number("partial_rotary_factor", 0, 1, 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.source}: partial_rotary_factor other than 1 is not supported")
    theta = (fields if fields.present("rope_theta") else config).number("rope_theta", 1.0, 1e15, 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta), positions
    factor = fields.number("factor", 1e-6, 1e6)
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=factor), positions
    outer = config.present("original_max_position_embeddings")
    original = (config if outer else fields).integer("original_max_position_embeddings", 1, most, positions)
    if kind == "llama3":
        low = fields.number("low_freq_factor", 1e-6, 1e6)
        high = fields.number("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            raise fields.fail("high_freq_factor", f"({high:g}) must be above low_freq_factor ({low:g})")
        rope = RopeConfig(
            theta=theta,
            type=kind,
            factor=factor,
            original_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        return rope, positions
    if theta == 1.0:
        raise fields.fail("rope_theta", "must be above 1 for yarn")
    rope = RopeConfig(
        theta=theta,
        type=kind,
        factor=factor,
        original_positions=original,
        beta_fast=fields.number("beta_fast", 0, 1e6, 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 0, 1e6, 1.0) or 1.0,
        truncate=fields.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(fields, factor),
    )
    return rope, min(max(positions, int(original * factor)), most)


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """How much sharper attention gets with the context's growth, unless the file says it outright."""
    if fields.present("attention_factor"):
        return fields.number("attention_factor", 0, 1e3)

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = (fields.number(key, 0, 1e3, 0.0) for key in ("mscale", "mscale_all_dim"))
    return growth(mscale) / growth(mscale_all_dim) if mscale and mscale_all_dim else growth(1.0)


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """[max_positions, head_dim] float32: cosines of the head_dim / 2 angles of each position, then their sines."""
    if device.type == "meta":  # shapes alone; torch's own arange there imports its compiler, which takes seconds
        return torch.empty(max_positions, head_dim, dtype=torch.float32, device=device)
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    angles = torch.arange(max_positions, dtype=torch.float32, device=device).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair: [head_dim / 2] float32, on the CPU so that all devices agree."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    if rope.type == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow rotations are stretched by the factor, fast ones kept, those between blended by their wavelength."""
    turns = rope.original_positions * plain / (2 * math.pi)  # full rotations within the trained context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """As `_llama3`, but blended linearly over the dimensions between two rotation counts."""

    def dimension(turns: float) -> float:  # the pair that turns so often within the trained context
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp is a step then
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)
