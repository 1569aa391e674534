"""Matrices of floats as checkpoints hold them, each part on its own, and as blocks use them, fused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.base import Kernels
from aengine.kernels.linear.fp8.quantize import GROUP, quantize_fp8
from aengine.kernels.linear.weights import Fp8Weight
from aengine.model.groups import Entry
from aengine.model.linear import LoadedExperts, LoadedLinear
from aengine.model.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Storage:
    """Where weights go, as what, and who computes with them."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Dense:
    """The parts of a fused matrix, one below the other, and of its bias."""

    def __init__(
        self, linear: LoadedLinear, parts: Mapping[str, int], bias: bool, storage: Storage, to_fp8: bool = False
    ) -> None:
        """parts: the checkpoint's names without ".weight" and ".bias", with their output widths, in order; to_fp8:
        whether the matrix is quantised once it is there.
        """
        self._to_fp8 = to_fp8
        self.entries = {f"{name}.weight": Entry((width, linear.inputs)) for name, width in parts.items()}
        if bias:
            self.entries |= {f"{name}.bias": Entry((width,)) for name, width in parts.items()}
        self._linear = linear
        self._parts = parts
        self._bias = bias
        self._storage = storage
        self._whole: tuple[Tensor, Tensor | None] | None = None

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        weight = self._storage.empty(self._linear.outputs, self._linear.inputs)
        bias = self._storage.empty(self._linear.outputs) if self._bias else None
        self._whole = weight, bias
        places = self._rows(weight, "weight")
        return places if bias is None else places | self._rows(bias, "bias")

    def close(self) -> None:
        if self._whole is None:
            raise RuntimeError("closed without having been opened")
        weight, bias = self._whole
        self._whole = None
        self._linear.loaded = (
            self._storage.kernels.quantized(in_fp8(weight), bias, self._storage.dtype)
            if self._to_fp8
            else self._storage.kernels.dense(weight, bias)
        )

    def _rows(self, whole: Tensor, kind: str) -> dict[str, Tensor]:
        return {f"{name}.{kind}": rows for name, rows in zip(self._parts, whole.split(list(self._parts.values())))}


class DenseExperts:
    """The matrices of a layer's experts, which checkpoints hold one by one or all in one."""

    def __init__(
        self, experts: LoadedExperts, name: str, spec: ExpertsSpec, storage: Storage, to_fp8: bool = False
    ) -> None:
        """name: of them all in the checkpoint; to_fp8: whether the matrices are quantised once they are there."""
        self._to_fp8 = to_fp8
        hidden, inner = experts.hidden, spec.inner
        self._parts = [  # of each expert
            [f"{name}.{expert}.{part}.weight" for part in (spec.gate, spec.up, spec.down)]
            for expert in range(spec.count)
        ]
        self._fused = f"{name}.gate_up_proj", f"{name}.down_proj"
        gate_up = tuple(part for gate, up, _ in self._parts for part in (gate, up))
        down = tuple(part for _, _, part in self._parts)
        self.entries = {
            self._fused[0]: Entry((spec.count, 2 * inner, hidden), optional=True, instead_of=gate_up),
            self._fused[1]: Entry((spec.count, hidden, inner), optional=True, instead_of=down),
            **dict.fromkeys(gate_up, Entry((inner, hidden))),
            **dict.fromkeys(down, Entry((hidden, inner))),
        }
        self._experts = experts
        self._storage = storage
        self._whole: tuple[Tensor, Tensor] | None = None

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        gate_up, down = (self._storage.empty(*self.entries[name].shape) for name in self._fused)
        self._whole = gate_up, down
        places = dict(zip(self._fused, self._whole))
        for expert, (gate, up, second) in enumerate(self._parts):
            places[gate], places[up] = gate_up[expert].chunk(2)
            places[second] = down[expert]
        return places

    def close(self) -> None:
        if self._whole is None:
            raise RuntimeError("closed without having been opened")
        gate_up, down = self._whole
        self._whole = None
        self._experts.loaded = (
            self._storage.kernels.quantized_experts(in_fp8(gate_up), in_fp8(down), self._storage.dtype)
            if self._to_fp8
            else self._storage.kernels.experts(gate_up, down)
        )


def in_fp8(weight: Tensor) -> Fp8Weight:
    """A matrix [n, k], or [experts, n, k], in blocks of 128 x 128, for inputs in groups of 128 columns."""
    matrices = weight.unsqueeze(0) if weight.dim() == 2 else weight
    made = [quantize_fp8(matrix) for matrix in matrices]
    values, scale = (torch.stack(parts) for parts in zip(*made))
    if weight.dim() == 2:
        values, scale = values[0], scale[0]
    return Fp8Weight(values, scale, (GROUP, GROUP), "group")
