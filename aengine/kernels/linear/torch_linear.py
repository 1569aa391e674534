"""A linear in plain torch. On a CPU, large float32 weights are in oneDNN's own layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Norm

AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
)

# oneDNN chooses its layout for this many rows. It is the best, or nearly, for other numbers of rows too.
_TYPICAL_ROWS = 64
# Elements. With a smaller weight oneDNN's call takes 22 us more, which is half of a product of one row.
_SMALLEST = 2**20


class TorchLinear:
    """The reference for every other linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [outputs, inputs], with its final contents, since it may be copied. bias: [outputs]."""
        self.outputs, self.inputs = weight.shape
        self._weight = pack(weight)
        self._packed = self._weight.is_mkldnn
        self._bias = bias

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"weight": self._weight, "bias": self._bias}

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if norm is not None:
            x = norm(x)
        elif gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate).mul_(up)
        product = packed_linear if self._packed else F.linear
        out = product(x, self._weight, self._bias)
        return out if residual is None else out.add_(residual)

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> None:
        return None


def pack(weight: Tensor) -> Tensor:
    """Return a large float32 matrix [out, in] on a CPU in oneDNN's own layout, and any other unchanged."""
    if not AVAILABLE or weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _SMALLEST:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [rows, in]. weight: packed, [out, in]. bias: [out]. Returns [rows, out]."""
    rows = x.shape[0]
    padded = padded_rows(rows)
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[:rows]


def padded_rows(rows: int) -> int:
    """Round up to 1..8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...: four sizes for each doubling.

    oneDNN compiles a kernel for each number of rows, some milliseconds the first time.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step
