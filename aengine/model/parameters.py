"""What blocks are made of: norms, linears and experts, by the names of their weights in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.base import Kernels, Route
from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.model.dense import Dense, DenseExperts, Storage
from aengine.model.groups import Group, Plain
from aengine.model.kv_scales import LoadedKVScales
from aengine.model.linear import LoadedExperts, LoadedLinear
from aengine.model.quant.base import LinearFormat
from aengine.model.quant.groups import QuantizedExperts, QuantizedLinear
from aengine.model.quant.scheme import QuantConfig
from aengine.model.spec import ExpertsSpec


class Parameters:
    """Makes the parameters of one model on one device ("meta" for shapes alone), and keeps their groups in order."""

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantConfig | None = None,
        kv_dtype: torch.dtype | None = None,
        to_fp8: bool = False,
    ) -> None:
        """quantization: the formats of linears and experts in the checkpoint; None: all are floats. kv_dtype: of the
        cache; None: `dtype`. to_fp8: whether matrices of floats are quantised while they are loaded.
        """
        self._to_fp8 = to_fp8
        self.kernels = kernels
        self._quantization = quantization
        self.groups: list[Group] = []
        self._storage = Storage(kernels, dtype, device)
        self._kv_dtype = kv_dtype or dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that is used as it is."""
        tensor = self._storage.empty(*shape)
        self.groups.append(Plain(name, tensor))
        return tensor

    def kv_scales(self, name: str) -> LoadedKVScales:
        """What a layer's cache is scaled with; name: of the attention in the checkpoint."""
        scales = LoadedKVScales(name, self._storage.device, self._kv_dtype)
        self.groups.append(scales)
        return scales

    def norm(self, name: str, width: int, eps: float) -> Norm:
        return self.kernels.norm(self.tensor(f"{name}.weight", width), eps)

    def linear(self, parts: Mapping[str, int], inputs: int, bias: bool = False, floats: bool = False) -> Linear:
        """A linear of several fused ones: their names in the checkpoint, with their output widths, in order.

        floats: it is never quantised, whether or not the checkpoint's configuration says so.
        """
        linear = LoadedLinear(inputs, sum(parts.values()))
        form = None if self._quantization is None or floats else self._quantization.format_of(*parts)
        self.groups.append(
            Dense(
                linear, parts, bias, self._storage, self._to_fp8 and linear.outputs >= GROUP and "lm_head" not in parts
            )
            if form is None
            else QuantizedLinear(linear, parts, bias, form, self._storage)
        )
        return linear

    def experts(self, name: str, hidden: int, spec: ExpertsSpec) -> Experts:
        """A layer's experts; name: of them all in the checkpoint."""
        experts = LoadedExperts(spec.count, hidden)
        forms = self._forms(name, spec)
        self.groups.append(
            DenseExperts(experts, name, spec, self._storage, self._to_fp8)
            if forms is None
            else QuantizedExperts(experts, name, spec, forms, self._storage)
        )
        return experts

    def _forms(self, name: str, spec: ExpertsSpec) -> tuple[LinearFormat, LinearFormat] | None:
        """The formats of the experts' gate and up, and of their down. Raises `UnsupportedModelError`: one alone."""
        if self._quantization is None:
            return None
        names = [f"{name}.{expert}.{{}}" for expert in range(spec.count)]
        gate_up = self._quantization.format_of(*(one.format(part) for one in names for part in (spec.gate, spec.up)))
        down = self._quantization.format_of(*(one.format(spec.down) for one in names))
        if gate_up is None and down is None:
            return None
        if gate_up is None or down is None:
            raise UnsupportedModelError(f"{name}: some of an expert's matrices are quantised, others are not")
        return gate_up, down

    def route(self, name: str, hidden: int, spec: ExpertsSpec) -> Route:
        """The choice of a layer's experts; name: of the router in the checkpoint."""
        weight = self.tensor(f"{name}.weight", spec.count, hidden)
        correction = self.tensor(f"{name}.e_score_correction_bias", spec.count) if spec.correction else None
        return self.kernels.route(weight, correction, spec.router)

    def embedding(self, name: str, count: int, width: int, head: str | None) -> tuple[Tensor, Linear]:
        """A table [count, width] and the linear that its rows are scored with: of its own name, or the table again."""
        if head is not None:
            return self.tensor(f"{name}.weight", count, width), self.linear({head: count}, width)
        table, linear = self._storage.empty(count, width), LoadedLinear(width, count)

        def share() -> None:
            linear.loaded = self.kernels.dense(table, None)

        self.groups.append(Plain(f"{name}.weight", table, share))
        return table, linear
