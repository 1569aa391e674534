"""The scales of an FP8 cache as checkpoints hold them, a number each for the keys and for the values of a layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.kv_scales import FP8, NO_SCALES, KVScales
from aengine.model.groups import Entry
from aengine.model.quant.base import SCALES, check_finite


class LoadedKVScales:
    """The scales of one layer: 1 where the checkpoint has none, or where the cache holds values themselves."""

    def __init__(self, name: str, device: torch.device, kept: torch.dtype) -> None:
        """name: of the attention in the checkpoint; kept: the cache's dtype."""
        self.loaded: KVScales = NO_SCALES
        # Present files name them after the attention, older ones after its projections, or have one for both.
        self._names = {part: (f"{name}.{part}_scale", f"{name}.{part}_proj.{part}_scale") for part in "kv"}
        self._both = f"{name}.kv_scale"
        names = (*self._names["k"], *self._names["v"], self._both)
        self.entries = dict.fromkeys(names, Entry((), SCALES, spellings=((1,),), optional=True))
        self._device = device
        self._kept = kept
        self._read = False
        self._places: dict[str, Tensor] = {}

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        self._places = {name: torch.ones((), dtype=torch.float32, device=self._device) for name in present}
        return self._places

    def close(self) -> None:
        """Reads the scales on the host. Raises `WeightsError`, naming the tensor, for one that is none, and for other
        ones than graphs on a GPU have captured.
        """
        if self._kept == FP8:
            scales = KVScales(self._scale("k"), self._scale("v"))
            if self._read and self._device.type == "cuda" and scales != self.loaded:
                raise WeightsError(f"{self._both}: the scales of the FP8 cache differ from those that are loaded")
            self.loaded = scales
        self._read = True
        self._places = {}

    def _scale(self, part: str) -> float:
        for name in (*self._names[part], self._both):
            if name in self._places:
                check_finite(self._places[name], [name], zero=False)
                return self._places[name].item()
        return 1.0
