"""A `Linear` whose weight stays in 4 bits. Very many rows are multiplied with the weight written out dense.

"Very many" are `DENSE_ROWS`, or `COPY_ROWS` if a dense copy is kept beside the codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.gated_rows import gated_config, gated_rows
from aengine.kernels.linear.int4.config import COPY_ROWS, DENSE_ROWS, one_row_config
from aengine.kernels.linear.int4.launch import Int4Product
from aengine.kernels.linear.int4.packed_codes import can_pack, pack_codes
from aengine.kernels.linear.weights.e2m1 import E2m1Weight
from aengine.kernels.linear.weights.integers import Int4Weight, Int8Weight


class Int4Linear:
    """`Linear` of int4 codes or 4-bit floats on a GPU. Codes of 8 bits are two of 4 bits.

    product: shared by all linears of a device, for its scratch memory. Use one stream at a time.
    """

    def __init__(
        self,
        weight: Int4Weight | Int8Weight | E2m1Weight,
        bias: Tensor | None,
        product: Int4Product,
        dtype: torch.dtype,
        copy: bool = False,
    ) -> None:
        """dtype: of x. copy: whether a dense weight is kept. Raises: ValueError for a group without a kernel."""
        self.outputs, self.inputs = weight.shape
        copy = copy and not isinstance(weight, Int8Weight)  # it would have twice the columns
        self._weight = pack_codes(weight.halves() if isinstance(weight, Int8Weight) else weight)
        self._bias = bias
        self._product = product
        self._dense_rows = COPY_ROWS if copy else DENSE_ROWS
        launch = launch_for(weight.scale.device)
        self._row_config = one_row_config(self._weight, launch) if dtype.itemsize == 2 else None
        self._copy: Tensor | None = None
        if copy:
            self._copy = torch.empty(self.outputs, self.inputs, dtype=dtype, device=weight.scale.device)
            with torch.cuda.device_of(self._copy):  # one thread makes the weights of all GPUs
                product.write_out(self._weight, self._copy, overlap=False)
        else:
            product.reserve(self.outputs * self._weight.columns, dtype, weight.scale.device)

    @staticmethod
    def fits(weight: Int4Weight | Int8Weight | E2m1Weight, dtype: torch.dtype) -> bool:
        """Return whether the kernels can read it, for x in `dtype`."""
        if isinstance(weight, Int8Weight):
            return dtype != torch.float32 and weight.has_halves
        return dtype != torch.float32 and can_pack(weight)

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"weight": self._weight, "bias": self._bias, "copy": self._copy}

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if gated:
            x = silu_mul(x)
        elif norm is not None:
            x = norm(x)
        if self._weight.order is not None:
            x = x.index_select(1, self._weight.order)
        if len(x) < self._dense_rows:
            if len(x) == 1 and self._row_config is not None:
                return self._product.row(x.contiguous(), self._weight, self._bias, residual, self._row_config)
            return self._product(x, self._weight, self._bias, residual=residual)
        if residual is None:
            return F.linear(x, self._dense(x.dtype), self._bias)
        if self._bias is not None:
            residual += self._bias
        return residual.addmm_(x, self._dense(x.dtype).t())

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> Tensor | None:
        if len(x) < self._dense_rows or self._bias is not None:
            return None
        config = gated_config(len(x), self.outputs // 2, self._weight.columns, x.element_size(), launch_for(x.device))
        if config is None:
            return None
        x = x if norm is None else norm(x)
        if self._weight.order is not None:
            x = x.index_select(1, self._weight.order)
        return gated_rows(x, self._dense(x.dtype), config)

    def _dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [outputs, columns of the codes] with its columns in the order of the codes."""
        return self._product.dequantised(self._weight, dtype) if self._copy is None else self._copy
