"""One matrix for each expert, as the kernels read it: in the type of the rows, or in FP8 with its scales."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight


@dataclass(frozen=True, slots=True)
class Matrices:
    """rows: of a matrix that share scales; 0: there are none. grouped: each 128 columns have a scale."""

    weight: Tensor  # [E, n, k]
    scale: Tensor | None = None  # float32 [E, ceil(n / rows), ceil(k / 128)], or [E, ceil(n / rows), 1]
    rows: int = 0
    grouped: bool = False
    activations: Activations = "token"  # how inputs are rounded
    input_scale: Tensor | None = None  # float32 [], if activations are "static"

    def __post_init__(self) -> None:
        if not self.weight.is_contiguous():
            raise ValueError("experts' weights must be contiguous")

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Return whether the kernels can read it: whole groups of 128 columns, and blocks of such groups."""
        k, columns = weight.weight.shape[-1], weight.block[1]
        return weight.weight.is_contiguous() and k % GROUP == 0 and (columns >= k or columns % GROUP == 0)

    @classmethod
    def from_fp8(cls, weight: Fp8Weight) -> Matrices:
        """Repeat the scales of blocks wider than 128 columns.

        A row is rounded once for all its experts, so the largest of their static scales of inputs is used. Raises:
        ValueError if not `fits`.
        """
        if not cls.fits(weight):
            raise ValueError(f"FP8 weights {list(weight.weight.shape)} have no kernel; use them dequantised")
        n, k = weight.weight.shape[1:]
        scale = weight.scale
        if scale.shape[-1] > 1 and weight.block[1] > GROUP:
            scale = scale.repeat_interleave(weight.block[1] // GROUP, -1)[..., : k // GROUP]
        grouped = scale.shape[-1] > 1 or weight.block[1] < k or k == GROUP
        known = None if weight.input_scale is None else weight.input_scale.amax()
        return cls(weight.weight, scale.contiguous(), min(weight.block[0], n), grouped, weight.activations, known)

    @property
    def constants(self) -> dict[str, int | bool]:
        """Return the kernels' compile-time constants of the scales."""
        count = 1 if self.scale is None else self.scale.shape[1]
        return {"SCALE_ROWS": self.rows, "SCALE_COUNT": count, "GROUPED": self.grouped}

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        """Return the weights and their scales; without scales, the weights twice."""
        return self.weight, self.weight if self.scale is None else self.scale
