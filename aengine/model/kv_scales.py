"""Reads the scales of an FP8 cache from checkpoints: one number for a layer's keys, and one for its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.kv_scales import FP8, NO_SCALES, KVScales
from aengine.model.groups import Entry
from aengine.model.quant.base import SCALES
from aengine.model.quant.checks import check_finite


class LoadedKVScales:
    """The scales of one layer. They are 1 if the checkpoint has none, or if the cache is not FP8."""

    def __init__(self, name: str, device: torch.device, kept: torch.dtype) -> None:
        """name: the attention's name in the checkpoint. kept: the cache's dtype."""
        self.loaded: KVScales = NO_SCALES
        # Newer files name scales after the attention, older files after its projections. Some have one scale for both.
        self._names = {part: (f"{name}.{part}_scale", f"{name}.{part}_proj.{part}_scale") for part in "kv"}
        self._both = f"{name}.kv_scale"
        names = (*self._names["k"], *self._names["v"], self._both)
        self.entries = dict.fromkeys(names, Entry((), SCALES, other_shapes=((1,),), optional=True))
        self._device = device
        self._kept = kept
        self._read = False
        self._places: dict[str, Tensor] = {}
        self._readers: list[Callable[[KVScales], None]] = []

    def add_reader(self, use: Callable[[KVScales], None]) -> None:
        """Call `use` with the scales now, and again when a checkpoint with other scales is loaded.

        `use` must not refer to this object or to the groups. Otherwise a reference cycle would keep the weights alive.
        """
        self._readers.append(use)
        use(self.loaded)

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        self._places = {name: torch.ones((), dtype=torch.float32, device=self._device) for name in present}
        return self._places

    def close(self) -> None:
        """Copy the scales to the host.

        Raises `WeightsError` if a scale is not a positive finite number, or if the scales differ from those that graphs
        on a GPU have captured.
        """
        if self._kept == FP8:
            scales = KVScales(self._scale("k"), self._scale("v"))
            if self._read and self._device.type == "cuda" and scales != self.loaded:
                raise WeightsError(f"{self._both}: the scales of the FP8 cache differ from those that are loaded")
            if scales != self.loaded:
                self.loaded = scales
                for use in self._readers:
                    use(scales)
        self._read = True
        self._places = {}

    def _scale(self, part: str) -> float:
        for name in (*self._names[part], self._both):
            if name in self._places:
                check_finite(self._places[name], [name], zero=False)
                return self._places[name].item()
        return 1.0
