"""The reference router: plain torch on any device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.experts.routing.router import Router, route_reference
from aengine.kernels.linear.base import Norm


class TorchRoute:
    """Norm, logits in float32, then the choice."""

    def __init__(self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None) -> None:
        """weight [experts, hidden], correction and bias [experts]; all may be filled later."""
        self._weight = weight
        self._correction = correction
        self._router = router
        self._bias = bias

    def after(self, norm: Norm | None, x: Tensor, slots: Tensor, first_slot: int) -> tuple[Tensor, Tensor, Tensor]:
        h = x if norm is None else norm(x)
        logits = F.linear(h.float(), self._weight.float(), None if self._bias is None else self._bias.float())
        ids, weights = route_reference(logits, self._router, self._correction)
        return h, ids.masked_fill_((slots < first_slot).unsqueeze(1), -1), weights
