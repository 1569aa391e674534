"""Chooses the tower of a family."""

from __future__ import annotations

from math import prod

import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.groups import entries_of
from aengine.model.images.spec import ImageSpec
from aengine.model.images.tower_specs import Gemma4Tower, PixtralTower, QwenTower
from aengine.model.parameters import Parameters
from aengine.model.towers.base import Tower
from aengine.model.towers.gemma4 import Gemma4Vision
from aengine.model.towers.parts import TowerOps
from aengine.model.towers.pixtral import PixtralVision
from aengine.model.towers.qwen import QwenVision
from aengine.model.towers.siglip import SiglipVision


def build_tower(make: Parameters, spec: ImageSpec, ops: TowerOps) -> Tower:
    """Return the tower of a model without its weights, which are in the groups of `make`.

    make: without ranks and adapters. Every rank has the whole tower, and adapters never change it.
    """
    tower = spec.tower
    if isinstance(tower, QwenTower):
        return QwenVision(make, spec, tower, ops)
    if isinstance(tower, PixtralTower):
        return PixtralVision(make, spec, tower, ops)
    if isinstance(tower, Gemma4Tower):
        return Gemma4Vision(make, spec, tower, ops)
    return SiglipVision(make, spec, tower, ops)


def count_weights(spec: ImageSpec) -> int:
    """Return the number of weights of a tower. No memory is allocated for them."""
    kernels = TorchKernels()
    make = Parameters(kernels, torch.float32, torch.device("meta"))
    build_tower(make, spec, TowerOps(kernels.rotate, TorchAttention().attend_whole))
    return sum(prod(entry.shape) for entry in entries_of(make.groups).values())
