"""FP8 with a scale for each block, each output or the whole matrix (Qwen, DeepSeek, Mistral; compressed-tensors)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import SCALES, LinearFormat, QuantConfig, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, not_fused, unsupported
from aengine.model.quant.names import Names, hugging_face_names

GROUP = 128  # columns of a token that share a scale if activations are "group"


@dataclass(frozen=True, slots=True)
class Fp8(LinearFormat):
    """`weight` [n, k] e4m3, and a scale for each block. 0 in `block` means the full length of the axis."""

    weight_class: ClassVar[type[QuantizedWeight]] = Fp8Weight
    bits: ClassVar[int] = 8
    rounds_inputs: ClassVar[bool] = True

    block: tuple[int, int]  # (128, 128); (1, 0): a scale for each output; (0, 0): one scale
    activations: Activations
    scale: str = "weight_scale"  # name of the tensor
    input_scale: str = "input_scale"

    @property
    def name(self) -> str:
        rows, columns = self.block
        return f"FP8 with a scale for each {rows or 'n'} x {columns or 'k'}, {self.activations} activations"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None and self.scale != "weight_scale_inv":
            raise not_fused(self.name, prefix)
        lead = () if experts is None else (experts,)
        grid = self._grid(outputs, inputs)
        # Some files store the scale of a whole matrix as a scalar, and scales of outputs as a vector.
        flat = ((outputs,),) if self.block == (1, 0) else ((), (1,)) if self.block == (0, 0) else ()
        weight, scale = self._name(prefix, "weight", experts), self._name(prefix, self.scale, experts)
        rows, columns = len(lead), len(lead) + 1  # axes
        other_shapes = tuple((*lead, *shape) for shape in flat)
        axes = TensorAxis(rows), TensorAxis(columns)
        scale_axes = (
            TensorAxis.of_scales(rows, self.block[0] or outputs, outputs),
            TensorAxis.of_scales(columns, self.block[1] or inputs, inputs),
        )
        shape = (*lead, outputs, inputs)
        tensors = [
            StoredTensor("weight", weight, shape, ("F8_E4M3",), outputs=axes[0], inputs=axes[1]),
            StoredTensor(
                "scale", scale, (*lead, *grid), SCALES, other_shapes, outputs=scale_axes[0], inputs=scale_axes[1]
            ),
        ]
        if self.activations == "static":
            name = self._name(prefix, self.input_scale, experts)
            tensors.append(StoredTensor("input_scale", name, lead, SCALES, ((*lead, 1),)))
        return tuple(tensors)

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Fp8Weight:
        experts = len(tensors["weight"]) if len(prefixes) == 1 and tensors["weight"].dim() > 2 else None
        scale, input_scale = tensors["scale"].float(), tensors.get("input_scale")
        check_finite(scale, [self._name(prefix, self.scale, experts) for prefix in prefixes])
        if input_scale is not None:
            names = [self._name(prefix, self.input_scale, experts) for prefix in prefixes]
            check_finite(input_scale, names, zero=False)
            input_scale = input_scale.float()
        weight = tensors["weight"]
        block = (self.block[0] or weight.shape[-2], self.block[1] or weight.shape[-1])
        return Fp8Weight(weight, scale, block, self.activations, input_scale)

    def _grid(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the number of blocks along both axes."""
        rows, columns = self.block
        return -(-outputs // (rows or outputs)), -(-inputs // (columns or inputs))

    def _name(self, prefix: str, tensor: str, experts: int | None) -> str:
        if experts is None:
            return f"{prefix}.{tensor}"
        return prefix if tensor == "weight" else f"{prefix}_{tensor.removeprefix('weight_')}"


def read_fp8(fields: Fields) -> QuantConfig:
    """Read `quant_method: "fp8"`: 128 x 128 blocks, or one scale for a matrix, as transformers or AutoFP8 write it."""
    for key, known in (
        ("fmt", ("e4m3", "float8_e4m3fn", "e4m3fn")),  # other names of it
        ("scale_fmt", ("float", "ue8m0")),
        ("expert_dtype", ("fp8",)),
    ):
        value = fields.text(key, known[0])
        if value not in known:
            raise unsupported(fields, f"{key} {shown(value)}", known[0])
    if fields.present("modules_to_convert") and fields.strings("modules_to_convert"):
        raise unsupported(fields, "modules_to_convert", "modules_to_not_convert")
    scheme = fields.text("activation_scheme", "dynamic").lower()
    if scheme not in ("dynamic", "static"):
        raise unsupported(fields, f"activation_scheme {shown(scheme)}", "dynamic and static")
    if fields.present("weight_block_size"):
        if scheme == "static":
            raise unsupported(fields, "activation_scheme static with weight_block_size", "dynamic")
        linear = Fp8(read_block(fields, "weight_block_size"), "group", "weight_scale_inv")
    else:
        # Without blocks the key is null. AutoFP8's older files lack the key, and their tensors have other names.
        names = ("weight_scale_inv", "activation_scale") if fields.has_key("weight_block_size") else ()
        linear = Fp8((0, 0), "static" if scheme == "static" else "token", *names)
    skipped = "modules_to_not_convert" if fields.present("modules_to_not_convert") else "ignored_layers"
    unchanged = hugging_face_names(fields, skipped, "lm_head")
    return QuantConfig(fields.source, "fp8", ((Names(all=True), linear),), unchanged)


def read_fbgemm_fp8(fields: Fields) -> QuantConfig:
    """Read `quant_method: "fbgemm_fp8"`: a scale for each output, as Meta publishes it. Inputs have no upper bound."""
    unchanged = hugging_face_names(fields, "modules_to_not_convert", "lm_head")
    return QuantConfig(fields.source, "fbgemm-fp8", ((Names(all=True), Fp8((1, 0), "token")),), unchanged)


def read_block(fields: Fields, key: str) -> tuple[int, int]:
    """Read the rows and columns that share a scale. Raises `UnsupportedModelError` for blocks without a kernel."""
    rows, columns = fields.integers(key, 2, 1, 2**20)
    if columns != GROUP or GROUP % rows:
        raise unsupported(fields, f"{key} {[rows, columns]}", f"[{GROUP}, {GROUP}] and divisors of its rows")
    return rows, columns
