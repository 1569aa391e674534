"""Small writers of every format, by the format's definition.

Each takes a matrix [n, k] float32. It returns the tensors of a checkpoint by their suffixes, and the matrix that they
stand for, computed by plain arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Encoded:
    tensors: dict[str, Tensor]  # by suffix: "weight_scale" of "model.layers.0.mlp.up_proj.weight_scale"
    meant: Tensor  # [n, k] float32
    rtol: float = 0.0  # if its definition rounds several times


@dataclass(frozen=True)
class Scheme:
    """A format with its parameters: the settings in config.json, and a writer of matrices."""

    config: dict[str, object]  # `quantization_config`
    encode: Callable[[Tensor, torch.Generator], Encoded]
    unchanged: tuple[str, ...] = field(default=("lm_head",))


def words(numbers: Tensor) -> Tensor:
    """Pack eight 4-bit numbers [..., 8] or four 8-bit numbers into an int32 [...], the first in the lowest bits."""
    places = torch.arange(0, 32, 32 // numbers.shape[-1])
    return (numbers.long() << places).sum(-1).to(torch.int32)  # wraps to negative numbers


def fp8(
    w: Tensor,
    generator: torch.Generator,
    *,
    block: tuple[int, int],
    scale: str,
    dtype: torch.dtype = torch.float32,
    input_scale: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Encoded:
    """shape: of the scales in the file."""
    n, k = w.shape
    rows, columns = block[0] or n, block[1] or k
    grid = torch.empty(-(-n // rows), -(-k // columns), dtype=dtype)
    codes, meant = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            grid[i, j] = w[part].abs().max() / E4M3_MAX
            s = float(grid[i, j])
            codes[part] = (w[part] / s).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            meant[part] = codes[part].float() * s
    tensors = {"weight": codes, scale: grid if shape is None else grid.reshape(shape)}
    if input_scale:
        tensors[input_scale] = 0.01 + 0.1 * torch.rand((), generator=generator)
    return Encoded(tensors, meant)


@dataclass(frozen=True)
class Integers:
    """A matrix of 4-bit or 8-bit numbers: code - zero, times the scale of its group."""

    codes: Tensor  # [n, k]
    zeros: Tensor  # [n, groups]
    scales: Tensor  # [n, groups]
    g_idx: Tensor  # [k]
    meant: Tensor  # [n, k]


def integers(
    w: Tensor, generator: torch.Generator, *, group: int, symmetric: bool, shuffled: bool, dtype: torch.dtype, bits: int
) -> Integers:
    n, k = w.shape
    middle, most = 2 ** (bits - 1), 2**bits - 1
    size = k if group == -1 else group
    columns = torch.randperm(k, generator=generator) if shuffled else torch.arange(k)
    g_idx = torch.empty_like(columns)
    g_idx[columns] = torch.arange(k) // size
    groups = -(-k // size)  # the last may be shorter
    exact = w.double()
    members = [exact[:, g_idx == g] for g in range(groups)]
    low = torch.stack([one.amin(1).clamp(max=0) for one in members], dim=1)
    high = torch.stack([one.amax(1).clamp(min=0) for one in members], dim=1)
    # One of the numbers is not used, so that a rounded scale still covers all values.
    scales = (torch.maximum(-low, high) / (middle - 1) if symmetric else (high - low) / (most - 1)).to(dtype)
    s = scales.double()
    zeros = torch.full((n, groups), middle).double() if symmetric else (-low / s).round().clamp(0, most)
    codes = ((exact / s[:, g_idx]).round() + zeros[:, g_idx]).clamp(0, most)
    meant = (codes - zeros[:, g_idx]) * s[:, g_idx]
    return Integers(codes, zeros, scales, g_idx, meant.float())


def gptq(
    w: Tensor,
    generator: torch.Generator,
    *,
    group: int,
    symmetric: bool,
    version: int,
    shuffled: bool = False,
    with_g_idx: bool = True,
    dtype: torch.dtype = torch.float16,
    bits: int = 4,
) -> Encoded:
    q = integers(w, generator, group=group, symmetric=symmetric, shuffled=shuffled, dtype=dtype, bits=bits)
    zeros = words(q.zeros.T.unflatten(1, (-1, 32 // bits)))
    ones = sum(1 << place for place in range(0, 32, bits))
    tensors = {
        "qweight": words(q.codes.T.unflatten(0, (-1, 32 // bits)).transpose(1, 2)),
        # Version 1 subtracts from the whole word, with borrows.
        "qzeros": zeros if version == 2 else (zeros.long() - ones).to(torch.int32),
        "scales": q.scales.T.contiguous(),
    }
    if with_g_idx:
        tensors["g_idx"] = q.g_idx.to(torch.int32)
    return Encoded(tensors, q.meant)


def awq(w: Tensor, generator: torch.Generator, *, group: int, dtype: torch.dtype = torch.float16) -> Encoded:
    q = integers(w, generator, group=group, symmetric=False, shuffled=False, dtype=dtype, bits=4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": words(q.codes.T.unflatten(1, (-1, 8))[..., order]),
        "qzeros": words(q.zeros.T.unflatten(1, (-1, 8))[..., order]),
        "scales": q.scales.T.contiguous(),
    }
    return Encoded(tensors, q.meant)


def awq_gemv(w: Tensor, generator: torch.Generator, *, group: int) -> Encoded:
    q = integers(w, generator, group=group, symmetric=False, shuffled=False, dtype=torch.float16, bits=4)
    each = {32: 32, 64: 16}.get(group, 8)  # groups of which zeros and scales are padded to a multiple
    zeros, scales = (F.pad(one, (0, -one.shape[1] % each)) for one in (q.zeros, q.scales))
    tensors = {"qweight": words(_in_pieces(q.codes, 8)), "qzeros": words(_in_pieces(zeros, 8)), "scales": scales}
    return Encoded(tensors, q.meant)


def pack_quantized(
    w: Tensor,
    generator: torch.Generator,
    *,
    group: int,
    symmetric: bool,
    shuffled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    bits: int = 4,
) -> Encoded:
    q = integers(w, generator, group=group, symmetric=symmetric, shuffled=shuffled, dtype=dtype, bits=bits)
    each = 32 // bits
    tensors = {
        "weight_packed": words(_in_pieces(q.codes, each)),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor(w.shape),
    }
    if shuffled:
        tensors["weight_g_idx"] = q.g_idx.to(torch.int32)
    if not symmetric:
        tensors["weight_zero_point"] = words(_in_pieces(q.zeros.T, each)).T.contiguous()
    return Encoded(tensors, q.meant)


def _in_pieces(numbers: Tensor, each: int) -> Tensor:
    """Divide rows into pieces of `each`. Zeros follow the last number."""
    return F.pad(numbers, (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))


def int_quantized(w: Tensor, generator: torch.Generator, *, channels: bool, symmetric: bool = True) -> Encoded:
    """Signed bytes, and a scale for each row or for the matrix."""
    low, high = (w.amin(1, True), w.amax(1, True)) if channels else (w.min().view(1, 1), w.max().view(1, 1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (torch.maximum(-low, high) / 127 if symmetric else (high - low) / 254).bfloat16()
    zero = torch.zeros_like(scale) if symmetric else (-127 - low / scale.float()).round().clamp(-128, 127)
    codes = (w / scale.float() + zero.float()).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scale if channels else scale.view(1)}
    if not symmetric:
        tensors["weight_zero_point"] = zero.to(torch.int8) if channels else zero.to(torch.int8).view(1)
    return Encoded(tensors, ((codes - zero.float()).double() * scale.double()).float())


def mx(w: Tensor, generator: torch.Generator, *, bits: int, name: str) -> Encoded:
    """4-bit or 8-bit floats in groups of 32, times a power of two."""
    groups = w.unflatten(1, (-1, 32)).double()
    largest, top = (6.0, 2) if bits == 4 else (E4M3_MAX, 8)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, True).clamp(min=2.0**-60))) - top
    numbers = (groups / 2.0**exponent).clamp(-largest, largest)
    if bits == 8:
        codes = numbers.float().to(torch.float8_e4m3fn)
        meant, stored = codes.double() * 2.0**exponent, codes.flatten(1)
    else:
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        indices = (numbers[..., None] - values).abs().argmin(-1)
        meant, flat = values[indices] * 2.0**exponent, indices.flatten(1).to(torch.uint8)
        stored = flat[:, 0::2] + 16 * flat[:, 1::2]
    scale = (exponent.squeeze(-1) + 127).to(torch.uint8)
    return Encoded({name: stored, "weight_scale": scale}, meant.flatten(1).float())


def nvfp4(w: Tensor, generator: torch.Generator, *, compressed: bool, with_inputs: bool = True) -> Encoded:
    """A scale in e4m3 for each 16 numbers, and one for the matrix, by which compressed-tensors divides."""
    n, k = w.shape
    whole = (w.abs().max() / (6 * E4M3_MAX)).clamp(min=2.0**-100).view(1)
    if compressed:
        whole = 1 / whole
    scale = torch.empty(n, k // 16, dtype=torch.float8_e4m3fn)
    codes, meant = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, k, dtype=torch.float64)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    for g in range(k // 16):
        columns = slice(16 * g, 16 * g + 16)
        exact = w[:, columns].double()
        of_matrix = 1 / float(whole) if compressed else float(whole)
        scale[:, g] = (exact.abs().amax(1) / 6 / of_matrix).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
        unit = scale[:, g].double()[:, None] * of_matrix
        codes[:, columns] = ((exact / unit)[..., None] - values).abs().argmin(-1).to(torch.uint8)
        meant[:, columns] = values[codes[:, columns].long()] * unit
    names = ("weight_packed", "weight_global_scale") if compressed else ("weight", "weight_scale_2")
    tensors = {names[0]: codes[:, 0::2] + 16 * codes[:, 1::2], "weight_scale": scale, names[1]: whole}
    if not compressed:
        tensors[names[1]] = whole.view(())
    if with_inputs:
        tensors["input_global_scale" if compressed else "input_scale"] = torch.rand(1, generator=generator)
    return Encoded(tensors, meant.float(), rtol=2.0**-22)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4(w: Tensor, generator: torch.Generator, *, nested: bool) -> Encoded:
    """Codes in blocks of 64 of the flat matrix. nested: scales are codes in blocks of 256, plus an offset."""
    flat, table = w.flatten(), torch.tensor(NF4)
    absmax = torch.stack([block.abs().max() for block in flat.split(64)])
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
    tensors = {"weight.absmax": absmax}
    if nested:
        offset, levels = float(absmax.mean()), torch.linspace(-1, 1, 256)
        largest = torch.stack([(block - offset).abs().max() for block in absmax.split(256)])
        whole = torch.cat([largest[i].expand(len(block)) for i, block in enumerate(absmax.split(256))])
        codes = ((absmax - offset)[:, None] / whole.clamp(min=1e-9)[:, None] - levels).abs().argmin(1)
        absmax = levels[codes] * whole + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": largest}
        tensors["weight.nested_quant_map"] = levels
    meant, indices = torch.empty_like(flat), torch.empty(len(flat), dtype=torch.uint8)
    for i in range(0, len(flat), 64):
        part = slice(i, i + 64)
        indices[part] = (flat[part, None] / absmax[i // 64] - table).abs().argmin(1)
        meant[part] = table[indices[part].long()] * absmax[i // 64]
    tensors |= {
        "weight": (indices[0::2] * 16 + indices[1::2])[:, None],
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return Encoded(tensors, meant.view(w.shape))


def bnb_int8(w: Tensor, generator: torch.Generator) -> Encoded:
    """Signed bytes, and the largest magnitude of each row."""
    largest = w.abs().amax(1)
    codes = (w / largest[:, None] * 127).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Encoded(tensors, codes * (largest * (1 / 127))[:, None])


def mxfp4(w: Tensor) -> Encoded:
    """w [experts, n, k] -> `_blocks` [experts, n, k/32, 16] and `_scales` [experts, n, k/32]."""
    experts, n, k = w.shape
    blocks = torch.empty(experts, n, k // 32, 16, dtype=torch.uint8)
    scales, meant = torch.empty(experts, n, k // 32, dtype=torch.uint8), torch.empty(experts, n, k)
    for e in range(experts):
        for i in range(n):
            for g in range(k // 32):
                values = w[e, i, 32 * g : 32 * g + 32]
                exponent = int(torch.floor(torch.log2(values.abs().max().clamp(min=2.0**-100)))) - 2
                scales[e, i, g] = exponent + 127
                codes = []
                for j, value in enumerate(values.tolist()):
                    magnitude = abs(value) / 2.0**exponent
                    code = min(range(8), key=lambda c: abs(E2M1[c] - magnitude))
                    codes.append(code + (8 if value < 0 else 0))
                    meant[e, i, 32 * g + j] = (-1 if value < 0 else 1) * E2M1[code] * 2.0**exponent
                blocks[e, i, g] = torch.tensor([codes[2 * b] + 16 * codes[2 * b + 1] for b in range(16)])
    return Encoded({"_blocks": blocks, "_scales": scales}, meant)
