"""The arithmetic of FP8 products in float64, as the formats define it, and random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.linear.fp8.quantize import E4M3, GROUP, LARGEST, quantize_fp8
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight

BLOCKS = {"blocks": (128, 128), "finer-rows": (64, 128), "channels": (1, 0), "tensor": (0, 0)}  # 0: all


def random_weight(
    n: int, k: int, block: tuple[int, int], device: torch.device, activations: Activations = "group"
) -> Fp8Weight:
    """Return a weight with blocks of very different magnitudes, so that a misplaced scale shows."""
    rows, columns = block[0] or n, block[1] or k
    weight = torch.randn(n, k, device=device)
    weight *= torch.logspace(-2, 0, n, device=device)[torch.randperm(n, device=device)][:, None]
    weight *= torch.logspace(-1, 1, k, device=device)[None, :]
    values, scale = quantize_fp8(weight, (rows, columns))
    known = torch.tensor(2.0**-4, device=device) if activations == "static" else None
    return Fp8Weight(values, scale, (rows, columns), activations, known)


def random_inputs(m: int, k: int, device: torch.device) -> Tensor:
    """Return inputs [m, k] with groups of different magnitudes; on a CPU they are exact in FP8.

    The interpreter's rounding to FP8 loses a carry: it turns 124 into 64 instead of 128.
    """
    x = torch.randn(m, k, device=device)
    magnitude = 2.0 ** (torch.arange(k, device=device) // GROUP % 2)
    if device.type == "cpu":
        x[:, ::GROUP] = 28  # a sixteenth of 448, so that the scale is a power of two
        return x.to(E4M3).float() * magnitude
    return x * magnitude


def exact_weight(weight: Fp8Weight) -> Tensor:
    """Return the matrix [n, k] in float64, element by element."""
    n, k = weight.weight.shape
    rows = torch.arange(n, device=weight.scale.device) // weight.block[0]
    columns = torch.arange(k, device=weight.scale.device) // weight.block[1]
    return weight.weight.double() * weight.scale.double()[rows][:, columns]


def rounded_inputs(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Round x [m, k] as the format says: float64 of e4m3 values times their scales."""
    m, k = x.shape
    wide = torch.zeros(m, -(-k // GROUP) * GROUP, device=x.device)
    wide[:, :k] = x
    if weight.activations == "group":
        largest = wide.view(m, -1, GROUP).abs().amax(2).repeat_interleave(GROUP, 1)[:, :k]
    elif weight.activations == "token":
        largest = wide.abs().amax(1, keepdim=True)
    else:
        assert weight.input_scale is not None
        largest = weight.input_scale * LARGEST
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3).double() * scale.double()


def exact_product(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Round both as the format says and multiply them in float64: [m, n]."""
    return rounded_inputs(x, weight) @ exact_weight(weight).T
