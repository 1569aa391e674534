"""Activations with parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.groups import Entry

_BETA, _EPS = 0.5, -1e-6  # if the checkpoint does not hold them


class XieluParameters:
    """The parameters of xIELU, as `Kernels.xielu` reads them."""

    def __init__(self, name: str, device: torch.device) -> None:
        """name: of the activation in the checkpoint."""
        self._names = [f"{name}.{one}" for one in ("alpha_p", "alpha_n", "beta", "eps")]
        self.entries = {
            one: Entry((1,), other_shapes=((),)) if i < 2 else Entry((), other_shapes=((1,),), optional=True)
            for i, one in enumerate(self._names)
        }
        self._stored = torch.empty(4, device=device)
        self.values = torch.empty(4, device=device)  # float32

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        self._stored[2:].copy_(torch.tensor([_BETA, _EPS]))
        return {name: self._stored[i].view(self.entries[name].shape) for i, name in enumerate(self._names)}

    def close(self) -> None:
        alphas, rest = F.softplus(self._stored[:2]), self._stored[2:]
        alphas[1] += rest[0]
        self.values.copy_(torch.cat((alphas, rest)))
