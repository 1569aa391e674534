"""Small writers of every format. They write one number at a time, by the format's definition.

Each takes a matrix [n, k] float32. It returns the tensors of a checkpoint by their suffixes, and the matrix that they
stand for, computed by plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Encoded:
    tensors: dict[str, Tensor]  # by suffix: "weight_scale" of "model.layers.0.mlp.up_proj.weight_scale"
    meant: Tensor  # [n, k] float32


@dataclass(frozen=True)
class Scheme:
    """A format with its parameters: the settings in config.json, and a writer of matrices."""

    config: dict[str, object]  # `quantization_config`
    encode: Callable[[Tensor, torch.Generator], Encoded]
    unchanged: tuple[str, ...] = field(default=("lm_head",))


def word(numbers: list[int]) -> int:
    """Pack eight 4-bit numbers into an int32, the first in the lowest bits."""
    value = sum(number << (4 * i) for i, number in enumerate(numbers))
    return value - 2**32 if value >= 2**31 else value


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
class Int4:
    """A matrix of 4-bit numbers: code - zero, times the scale of its group."""

    codes: list[list[int]]  # [n][k]
    zeros: list[list[int]]  # [n][groups]
    scales: Tensor  # [n, groups]
    g_idx: list[int]  # [k]
    meant: Tensor  # [n, k]


def int4(
    w: Tensor, generator: torch.Generator, *, group: int, symmetric: bool, shuffled: bool, dtype: torch.dtype
) -> Int4:
    n, k = w.shape
    size = k if group == -1 else group
    columns = torch.randperm(k, generator=generator).tolist() if shuffled else list(range(k))
    g_idx = [0] * k
    for place, column in enumerate(columns):
        g_idx[column] = place // size
    groups = -(-k // size)  # the last may be shorter
    members = [[j for j in range(k) if g_idx[j] == g] for g in range(groups)]
    codes, zeros = [[0] * k for _ in range(n)], [[8] * groups for _ in range(n)]
    scales, meant = torch.empty(n, groups, dtype=dtype), [[0.0] * k for _ in range(n)]
    for i, row in enumerate(w.tolist()):
        for g, group_members in enumerate(members):
            values = [row[j] for j in group_members]
            low, high = min(*values, 0.0), max(*values, 0.0)
            # One of the sixteen numbers is not used, so that a rounded scale still covers all values.
            scales[i, g] = max(abs(low), abs(high)) / 7 if symmetric else (high - low) / 14
            s = float(scales[i, g])
            if not symmetric:
                zeros[i][g] = min(15, max(0, round(-low / s)))
            for j, value in zip(group_members, values):
                codes[i][j] = min(15, max(0, round(value / s) + zeros[i][g]))
                meant[i][j] = (codes[i][j] - zeros[i][g]) * s
    return Int4(codes, zeros, scales, g_idx, torch.tensor(meant))


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
) -> Encoded:
    q = int4(w, generator, group=group, symmetric=symmetric, shuffled=shuffled, dtype=dtype)
    n, k, groups = len(q.codes), len(q.codes[0]), q.scales.shape[1]
    qweight = [[word([q.codes[i][8 * a + b] for b in range(8)]) for i in range(n)] for a in range(k // 8)]
    qzeros = []
    for g in range(groups):
        row = []
        for a in range(n // 8):
            value = word([q.zeros[8 * a + b][g] for b in range(8)])
            if version == 1:  # subtracted from the whole word, with borrows
                value = (value - 0x11111111) % 2**32
                value -= 2**32 if value >= 2**31 else 0
            row.append(value)
        qzeros.append(row)
    tensors = {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": q.scales.T.contiguous(),
    }
    if with_g_idx:
        tensors["g_idx"] = torch.tensor(q.g_idx, dtype=torch.int32)
    return Encoded(tensors, q.meant)


def awq(w: Tensor, generator: torch.Generator, *, group: int, dtype: torch.dtype = torch.float16) -> Encoded:
    q = int4(w, generator, group=group, symmetric=False, shuffled=False, dtype=dtype)
    n, k, groups = len(q.codes), len(q.codes[0]), q.scales.shape[1]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight = [[word([q.codes[8 * a + b][j] for b in order]) for a in range(n // 8)] for j in range(k)]
    qzeros = [[word([q.zeros[8 * a + b][g] for b in order]) for a in range(n // 8)] for g in range(groups)]
    tensors = {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": q.scales.T.contiguous(),
    }
    return Encoded(tensors, q.meant)


def pack_quantized(
    w: Tensor,
    generator: torch.Generator,
    *,
    group: int,
    symmetric: bool,
    shuffled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Encoded:
    q = int4(w, generator, group=group, symmetric=symmetric, shuffled=shuffled, dtype=dtype)
    n, k, groups = len(q.codes), len(q.codes[0]), q.scales.shape[1]
    packed = [[word(row[8 * a : 8 * a + 8]) for a in range(-(-k // 8))] for row in q.codes]
    tensors = {
        "weight_packed": torch.tensor(packed, dtype=torch.int32),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if shuffled:
        tensors["weight_g_idx"] = torch.tensor(q.g_idx, dtype=torch.int32)
    if not symmetric:
        zeros = [
            [word([q.zeros[i][g] for i in range(8 * a, min(8 * a + 8, n))]) for g in range(groups)]
            for a in range(-(-n // 8))
        ]
        tensors["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int32)
    return Encoded(tensors, q.meant)


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
