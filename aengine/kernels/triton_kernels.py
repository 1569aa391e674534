"""`Kernels` for CUDA devices: our Triton kernels, and cuBLAS for large products.

Kernels that only some models need are imported when such a model is built. Triton reads a kernel's source when it is
imported, which takes 1 ms. Two thirds of the kernels are for experts, quantised weights, recurrent layers and adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aengine.kernels import elementwise
from aengine.kernels.attention.inputs import latent_inputs, qk_norm_rope_store
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.launch import Launch, launch_for
from aengine.kernels.linear.fp8.quantize import GROUP, quantize_fp8
from aengine.kernels.linear.int4.config import int4_borders
from aengine.kernels.linear.small_linear import SmallLinear
from aengine.kernels.linear.triton_linear import TritonLinear
from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight, Int8Weight
from aengine.kernels.parts import Parts

if TYPE_CHECKING:
    from aengine.kernels.delta.base import DeltaWeights
    from aengine.kernels.delta.triton_delta import TritonDelta
    from aengine.kernels.experts.base import Experts, RegisteredExperts
    from aengine.kernels.experts.routing.route import Route, TritonRoute
    from aengine.kernels.experts.routing.route_rows import RouteRows
    from aengine.kernels.experts.routing.router import Router
    from aengine.kernels.experts.triton_experts import TritonExperts
    from aengine.kernels.linear.base import Linear, RegisteredLinear
    from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
    from aengine.kernels.linear.fp8.few_rows import Fp8FewRows
    from aengine.kernels.linear.int4.launch import Int4Product
    from aengine.kernels.linear.weights.base import QuantizedWeight
    from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters
    from aengine.kernels.lora.order import TokenOrder
    from aengine.kernels.lora.triton_adapted import TritonAdapted
    from aengine.kernels.mamba.base import MambaWeights
    from aengine.kernels.mamba.triton_mamba import TritonMamba


def _fp8_borders(n: int, k: int, launch: Launch, most: int) -> list[int]:
    from aengine.kernels.linear.fp8.config import fp8_borders

    return fp8_borders(n, k, launch, most)


# For warm-up: functions that return the numbers of rows after which linears of a weight class use other kernels.
LINEAR_BORDERS: Mapping[type[QuantizedWeight], Callable[[int, int, Launch, int], list[int]]] = {
    Fp8Weight: _fp8_borders,
    Int4Weight: int4_borders,
    Int8Weight: lambda n, k, launch, most: int4_borders(n, 2 * k, launch, most),
    Mxfp4Weight: int4_borders,
    Nvfp4Weight: int4_borders,
}


class TritonKernels:
    """`Kernels` in Triton. They run on the current stream or on one that it waits for. Use one stream at a time."""

    def __init__(self, unpacked_copies: bool = False) -> None:
        """unpacked_copies: whether 4-bit linears also keep a copy of their weight in floats."""
        self._unpacked_copies = unpacked_copies
        self._small_linear = SmallLinear()
        self._adapter_parts = Parts()
        self._orders: dict[TokenAdapters, TokenOrder] = {}

    @cached_property
    def _fp8_shared(self) -> tuple[Fp8FewRows, BlockProducts]:
        from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
        from aengine.kernels.linear.fp8.few_rows import Fp8FewRows

        return Fp8FewRows(), BlockProducts()

    @cached_property
    def _int4_product(self) -> Int4Product:
        from aengine.kernels.linear.int4.launch import Int4Product

        return Int4Product()

    @cached_property
    def _routes(self) -> tuple[Route, RouteRows]:
        from aengine.kernels.experts.routing.route import Route
        from aengine.kernels.experts.routing.route_rows import RouteRows

        return Route(), RouteRows()

    def norm(self, weight: Tensor, eps: float) -> elementwise.TritonNorm:
        return elementwise.TritonNorm(weight, eps)

    def dense(self, weight: Tensor, bias: Tensor | None) -> TritonLinear:
        return TritonLinear(weight, bias, self._small_linear)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> RegisteredLinear:
        """Use the dequantised weight if there is no kernel for its shape, its dtype or this device."""
        match weight:
            case Fp8Weight() if launch_for(weight.weight.device).fp8:
                from aengine.kernels.linear.fp8.linear import Fp8Linear

                if Fp8Linear.fits(weight):
                    return Fp8Linear(weight, bias, *self._fp8_shared)
            case Int4Weight() | Int8Weight() | E2m1Weight():
                from aengine.kernels.linear.int4.linear import Int4Linear

                if Int4Linear.fits(weight, dtype):
                    return Int4Linear(weight, bias, self._int4_product, dtype, self._unpacked_copies)
        return self.dense(weight.dequantize().to(dtype), bias)

    def gains_by_fp8(self, device: torch.device, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 2 and launch_for(device).fp8

    def rounded(self, linear: RegisteredLinear) -> RegisteredLinear:
        if not isinstance(linear, TritonLinear) or not self.gains_by_fp8(linear.weight.device, linear.weight.dtype):
            return linear
        weight = Fp8Weight(*quantize_fp8(linear.weight), (GROUP, GROUP), "group")
        return self.quantized(weight, linear.bias, linear.weight.dtype)

    def adapted(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters) -> TritonAdapted:
        from aengine.kernels.lora.order import TokenOrder
        from aengine.kernels.lora.triton_adapted import DenseAdapted, TritonAdapted

        order = self._orders.get(tokens)
        if order is None:
            order = self._orders[tokens] = TokenOrder(len(weights.a), tokens)
        if isinstance(linear, TritonLinear):
            return DenseAdapted(linear, weights, tokens, order, self._adapter_parts)
        return TritonAdapted(linear, weights, tokens, order, self._adapter_parts)

    def adapted_experts(self, experts: Experts, weights: ExpertAdapters, tokens: TokenAdapters) -> Experts:
        from aengine.kernels.experts.triton_experts import TritonExperts
        from aengine.kernels.lora.triton_adapted import TritonAdaptedExperts

        if not isinstance(experts, TritonExperts):
            raise TypeError(f"these experts are of other kernels: {type(experts).__name__}")
        return TritonAdaptedExperts(experts, weights, tokens)

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, dtype: torch.dtype, rule: ExpertRule = SILU
    ) -> RegisteredExperts:
        """Use the dequantised matrices if there is no kernel for their shape, rule or dtype, or this device."""
        from aengine.kernels.experts.matrices import Matrices
        from aengine.kernels.experts.packed.matrices import PackedMatrices
        from aengine.kernels.experts.products import fp8_experts, packed_experts

        match gate_up, down:
            case (Fp8Weight() as first, Fp8Weight() as second) if rule.plain:
                if Matrices.fits(first) and Matrices.fits(second) and launch_for(second.weight.device).fp8:
                    return fp8_experts(first, second, rule)
            case (Int4Weight() | E2m1Weight() as first, Int4Weight() | E2m1Weight() as second):
                if PackedMatrices.fits(first) and PackedMatrices.fits(second) and dtype != torch.float32:
                    return packed_experts(first, second, rule)
        return self.experts(gate_up.dequantize().to(dtype), down.dequantize().to(dtype), rule)

    def experts(self, gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> TritonExperts:
        from aengine.kernels.experts.products import float_experts

        return float_experts(gate_up, down, rule)

    def with_shared(
        self, experts: Experts, gate_up: Linear, down: Linear, gate: Tensor | None, h: Tensor, top_k: int
    ) -> TritonExperts | None:
        from aengine.kernels.experts.products import FloatProducts
        from aengine.kernels.experts.single_rows import SharedMatrices
        from aengine.kernels.experts.triton_experts import TritonExperts

        if not (isinstance(experts, TritonExperts) and isinstance(gate_up, TritonLinear)):
            return None
        if not isinstance(down, TritonLinear) or gate_up.bias is not None or down.bias is not None:
            return None
        products = experts.products
        if not isinstance(products, FloatProducts) or not (products.rule.plain and products.rule.gated):
            return None
        if products.single_config(len(h), top_k, h.dtype, launch_for(h.device)) is None:
            return None
        shared = SharedMatrices(gate_up.weight, down.weight, gate)
        return TritonExperts(products.with_shared(shared)) if shared.can_fuse(h, top_k) else None

    def route(
        self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None = None
    ) -> TritonRoute:
        from aengine.kernels.experts.routing.route import TritonRoute

        return TritonRoute(weight, correction, router, *self._routes, bias)

    def delta_net(self, weights: DeltaWeights) -> TritonDelta:
        from aengine.kernels.delta.triton_delta import TritonDelta

        return TritonDelta(weights)

    def mamba(self, weights: MambaWeights) -> TritonMamba:
        from aengine.kernels.mamba.triton_mamba import TritonMamba

        return TritonMamba(weights)

    silu_mul = staticmethod(elementwise.silu_mul)
    gated_silu_mul = staticmethod(elementwise.gated_silu_mul)
    gelu_mul = staticmethod(elementwise.gelu_mul)
    xielu = staticmethod(elementwise.xielu)
    gate_output = staticmethod(elementwise.gate_output)
    rotate = staticmethod(elementwise.rotate)
    qk_norm_rope_store = staticmethod(qk_norm_rope_store)
    latent_inputs = staticmethod(latent_inputs)
