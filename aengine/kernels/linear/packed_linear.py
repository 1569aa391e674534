"""Matrices reordered for oneDNN: on a CPU in float32 up to twice as fast as the plain product where they are large.

The operators are the ones that torch's own compiler emits for frozen weights. Where torch was built
without them, nothing is packed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
)

# The reordering is chosen for this many rows; it is also the best one, or nearly, for fewer and for more.
_TYPICAL_ROWS = 64
# Elements. Of smaller ones the call alone takes 22 us more, half of a single row's product; beyond 32 rows both are as
# fast.
_SMALLEST = 2**20


def pack(weight: Tensor) -> Tensor:
    """A large float32 matrix [out, in] of a CPU in oneDNN's own layout, any other as it is."""
    if not AVAILABLE or weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _SMALLEST:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in], a packed weight [out, in], bias [out] -> [rows, out]."""
    rows = x.shape[0]
    padded = padded_rows(rows)
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[:rows]


def padded_rows(rows: int) -> int:
    """The next of 1..8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...: four sizes for each doubling.

    oneDNN compiles a kernel for each number of rows, some milliseconds the first time.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step
