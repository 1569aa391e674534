"""The specification of what a decoder computes before its first layer and after its last one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.spec.layer import NormSpec


class LayerInputsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A second embedding. Each layer reads its own part of it, mixed with a projection of the first embedding."""

    vocab: int
    width: int  # of one layer's part
    partial: bool = False  # whether the table lacks the last tokens; these read its first row

    def parameters(self, hidden: int, layers: int) -> int:
        """Return the number of weights that all layers share, without the table."""
        return layers * self.width * hidden + self.width

    def table(self, layers: int) -> int:
        """Return the number of weights of the table."""
        return self.vocab * layers * self.width


class EndsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The operations before the first layer and after the last layer."""

    norm: NormSpec  # after the last layer
    embedding_norm_eps: float | None = None  # of an RMS norm of embeddings, without a weight; None: no norm
    embedding_scale: float = 1.0  # after the norm
    logit_scale: float = 1.0
    logit_bias: bool = False  # whether the output matrix has a bias
    logit_softcap: float | None = None
    layer_inputs: LayerInputsSpec | None = None

    def embedding_function(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """Return the function that is applied to rows of the embedding, or None if they are used as they are.

        The function returns a new tensor and never changes the rows. On several GPUs, the norm of the first layer may
        have been computed for the memory of the rows. It is not computed again for a tensor in the same memory.

        dtype: of the rows.
        """
        eps = self.embedding_norm_eps
        if eps is None and self.embedding_scale == 1.0:
            return None
        scale = torch.tensor(self.embedding_scale, dtype=dtype).item()  # rounded like the rows

        def change(rows: Tensor) -> Tensor:
            if eps is not None:
                rows = F.rms_norm(rows.float(), rows.shape[-1:], eps=eps).to(dtype)
            return rows if scale == 1.0 else rows * scale

        return change
