"""bitsandbytes: nf4 and fp4 in blocks of the flat matrix, and int8 with one scale for each output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.floats import FloatWeight
from aengine.kernels.linear.weights.integers import Int8Weight
from aengine.model.fields import Fields, shown
from aengine.model.quant.base import SCALES, LinearFormat, QuantConfig, StoredTensor, TensorAxis
from aengine.model.quant.checks import check_finite, not_fused, unsupported
from aengine.model.quant.formats.int_quantized import unsigned
from aengine.model.quant.names import Names, hugging_face_names

_BLOCK = 64  # neighbouring numbers of the flat matrix that share a scale
_NESTED_BLOCK = 256  # scales that share a scale
_STATE_BYTES = 2048  # the most bytes of JSON


class _State(msgspec.Struct):
    """The JSON that is stored as bytes beside a matrix."""

    quant_type: str
    blocksize: int
    shape: list[int]
    nested_blocksize: int = _NESTED_BLOCK
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class BitsAndBytes4(LinearFormat):
    """`weight` [n * k / 2, 1] uint8, the upper half of a byte first, and tensors whose names begin with `weight.`.

    No kernel reads it, so it is dequantised while it is loaded. Ranks read whole matrices.
    """

    weight_class: ClassVar[type[QuantizedWeight]] = FloatWeight
    bits: ClassVar[int] = 16

    kind: str  # nf4 or fp4
    nested: bool  # whether scales are 8-bit codes

    @property
    def name(self) -> str:
        return f"bitsandbytes {self.kind}{' with nested scales' if self.nested else ''}"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("bitsandbytes", prefix)
        weight, total = f"{prefix}.weight", outputs * inputs
        blocks, bytes_ = -(-total // _BLOCK), -(-total // 2)
        tensors = [
            StoredTensor("codes", weight, (bytes_, 1), ("U8",), ((bytes_,), (1, bytes_)), scatters_columns=True),
            StoredTensor("absmax", f"{weight}.absmax", (blocks,), ("U8",) if self.nested else SCALES),
            StoredTensor("map", f"{weight}.quant_map", (16,), SCALES),
            StoredTensor(
                "state", f"{weight}.quant_state.bitsandbytes__{self.kind}", (_STATE_BYTES,), ("U8",), at_most=True,
                random_value=0,
            ),
        ]  # fmt: skip
        if self.nested:
            nested = (-(-blocks // _NESTED_BLOCK),)
            tensors.append(StoredTensor("nested_absmax", f"{weight}.nested_absmax", nested, SCALES))
            tensors.append(StoredTensor("nested_map", f"{weight}.nested_quant_map", (256,), SCALES))
        return tuple(tensors)

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> FloatWeight:
        if tensors["codes"].dim() == 2:
            return FloatWeight(self._unpack(prefixes[0], outputs, inputs, tensors))
        each = ({key: tensor[e] for key, tensor in tensors.items()} for e in range(len(prefixes)))
        matrices = [self._unpack(prefix, outputs, inputs, one) for prefix, one in zip(prefixes, each)]
        return FloatWeight(torch.stack(matrices))

    def _unpack(self, prefix: str, outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Tensor:
        codes, scale = tensors["codes"].flatten(), tensors["absmax"]
        if self.nested:
            state, blocks = self._state(prefix, [outputs, inputs], tensors["state"]), len(scale)
            of_scales = tensors["nested_absmax"].float().repeat_interleave(_NESTED_BLOCK)[:blocks]
            scale = tensors["nested_map"].float().index_select(0, scale.int()) * of_scales + state.nested_offset
        else:
            self._state(prefix, [outputs, inputs], tensors["state"])
        check_finite(scale, [f"{prefix}.weight.absmax"], negative=True)
        check_finite(tensors["map"], [f"{prefix}.weight.quant_map"], negative=True)
        indices = torch.stack((codes >> 4, codes & 15), -1).flatten()[: outputs * inputs].int()
        values = tensors["map"].float().index_select(0, indices)
        values *= scale.float().repeat_interleave(_BLOCK)[: outputs * inputs]
        return values.view(outputs, inputs)

    def _state(self, prefix: str, shape: list[int], stored: Tensor) -> _State:
        """Return the settings of a matrix. Waits for the device. Raises `WeightsError` if they are not as expected."""
        expected = _State(self.kind, _BLOCK, shape)
        text = b"" if stored.is_meta else bytes(stored.cpu().tolist()).rstrip(b"\0")
        if not text:  # weights without contents, or random ones
            return expected
        name = f"{prefix}.weight.quant_state.bitsandbytes__{self.kind}"
        try:
            state = msgspec.json.decode(text, type=_State)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeightsError(f"{name}: {error}") from None
        for field in ("quant_type", "blocksize", "shape", "nested_blocksize"):
            if (found := getattr(state, field)) != (known := getattr(expected, field)):
                raise WeightsError(f"{name}: {field} is {shown(found)}, must be {known}")
        return state


@dataclass(frozen=True, slots=True)
class BitsAndBytes8(LinearFormat):
    """`weight` [n, k] int8, and `SCB` [n], 127 times the scale of an output. Inputs stay in floats."""

    weight_class: ClassVar[type[QuantizedWeight]] = Int8Weight
    bits: ClassVar[int] = 9

    @property
    def name(self) -> str:
        return "bitsandbytes int8"

    def stored(self, prefix: str, outputs: int, inputs: int, experts: int | None = None) -> tuple[StoredTensor, ...]:
        if experts is not None:
            raise not_fused("bitsandbytes", prefix)
        rows = TensorAxis(0)
        return (
            StoredTensor("weight", f"{prefix}.weight", (outputs, inputs), ("I8",), outputs=rows, inputs=TensorAxis(1)),
            StoredTensor("scale", f"{prefix}.SCB", (outputs, 1), SCALES, ((outputs,),), outputs=rows, random_value=1),
            StoredTensor("layout", f"{prefix}.weight_format", (), ("U8",), ((1,),), optional=True),
        )

    def unpack(self, prefixes: Sequence[str], outputs: int, inputs: int, tensors: Mapping[str, Tensor]) -> Int8Weight:
        layout = tensors.get("layout")
        if layout is not None and not layout.is_meta and bool(layout.any()):
            raise WeightsError(f"{prefixes[0]}.weight_format is not 0: columns are in another order; save it anew")
        check_finite(tensors["scale"], [f"{prefix}.SCB" for prefix in prefixes])
        # A product, as in bitsandbytes. Torch divides by a number in another way on a GPU than on a CPU.
        return Int8Weight(unsigned(tensors["weight"]), tensors["scale"] * (1 / 127))


def read_bitsandbytes(fields: Fields) -> QuantConfig:
    """Read `quant_method: "bitsandbytes"`, which transformers and unsloth write."""
    unchanged = hugging_face_names(fields, "llm_int8_skip_modules", "lm_head")
    form: LinearFormat = BitsAndBytes8()
    if not fields.flag("load_in_8bit", default=False):
        if not fields.flag("load_in_4bit", default=False):
            raise unsupported(fields, "bitsandbytes with neither load_in_4bit nor load_in_8bit", "one of them")
        kind, storage = (
            fields.text("bnb_4bit_quant_type", "fp4").lower(),
            fields.text("bnb_4bit_quant_storage", "uint8"),
        )
        if kind not in ("nf4", "fp4"):
            raise unsupported(fields, f"bnb_4bit_quant_type {shown(kind)}", "nf4 and fp4")
        if storage.removeprefix("torch.") != "uint8":
            raise unsupported(fields, f"bnb_4bit_quant_storage {shown(storage)}", "uint8")
        form = BitsAndBytes4(kind, fields.flag("bnb_4bit_use_double_quant", default=False))
    return QuantConfig(fields.source, "bitsandbytes", ((Names(all=True), form),), unchanged)
