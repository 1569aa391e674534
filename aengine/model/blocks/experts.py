"""The feed-forward part of a layer with a mixture of experts."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.experts.base import Experts
from aengine.model.blocks.step import Step
from aengine.model.linear import ExpertsSlot
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec import ExpertsSpec


class MixtureOfExperts:
    """Norm, the choice of some experts for each token, and their weighted results added to x."""

    def __init__(self, make: Parameters, layer: str, hidden: int, spec: ExpertsSpec, eps: float) -> None:
        """layer: its name in checkpoints."""
        name = f"{layer}.{spec.block}"
        self._norm = make.norm(f"{layer}.post_attention_layernorm", hidden, eps)
        self._route = make.route(f"{name}.{spec.router_name}", hidden, spec)
        self._experts = make.experts(f"{name}.experts", hidden, spec)
        self._shared = None if spec.shared is None else SharedExpert(make, name, hidden, spec)
        self._sum = make.sum()

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        h, ids, weights = self._route.after(self._norm, x, step.slots(len(x)), step.kv.page_size)
        experts: Experts = self._experts
        shared = self._shared
        together = None if shared is None else shared.beside(self._experts, h, ids.shape[1])
        if together is not None:
            experts, shared = together, None
        if self._sum is None:
            if shared is not None:
                x = shared.add_to(h, x)
            return experts.add_to(h, ids, weights, x)
        # One sum for all that a rank has to add.
        part = None if shared is None else shared(h)
        part = experts.add_to(h, ids, weights, part)
        return self._sum.of(part.__getitem__, x)


class SharedExpert:
    """The expert that every token passes, its result weighted by a sigmoid where there is a gate.

    Of ranks, each gives its part of the sum.
    """

    def __init__(self, make: Parameters, name: str, hidden: int, spec: ExpertsSpec) -> None:
        if spec.shared is None:
            raise ValueError("there is no shared expert")
        self._kernels = make.kernels
        inner, bias = Part(spec.shared.inner), spec.shared.bias
        parts = {f"{name}.{spec.shared_name}.gate_proj": inner, f"{name}.{spec.shared_name}.up_proj": inner}
        self._gate_up = make.linear(parts, hidden, bias, split="outputs")
        down = {f"{name}.{spec.shared_name}.down_proj": Part(hidden)}
        self._down = make.linear(down, inner.width, bias, split="inputs")
        gate = f"{name}.{spec.shared_name}_gate"
        self._gate = make.shared_gate(gate, hidden) if spec.shared_gate else None
        self._adapters = None if make.adapters is None else make.adapters.tokens

    def __call__(self, h: Tensor) -> Tensor:
        """h [tokens, hidden], normed -> [tokens, hidden]."""
        return self._down.apply(self._inner(h))

    def add_to(self, h: Tensor, x: Tensor) -> Tensor:
        """The same, added to x [tokens, hidden]."""
        return self._down.apply(self._inner(h), residual=x)

    def beside(self, experts: ExpertsSlot, h: Tensor, top_k: int) -> Experts | None:
        """Experts with this one beside them in the same launches; None: it is computed on its own.

        h [tokens, hidden], of which each goes to top_k of the experts.
        """
        # Kernels number the experts from 0.
        if experts.first or self._adapted:
            return None
        gate_up, down = self._gate_up.unadapted, self._down.unadapted
        if experts.unadapted is None or gate_up is None or down is None:
            return None
        row = None if self._gate is None else self._gate[0]
        return self._kernels.with_shared(experts.unadapted, gate_up, down, row, h, top_k)

    @property
    def _adapted(self) -> bool:
        """Whether some token of the step has an adapter."""
        return self._adapters is not None and self._adapters.places is not None

    def _inner(self, h: Tensor) -> Tensor:
        if self._gate is None:
            return self._kernels.silu_mul(self._gate_up.apply(h))  # [tokens, inner]
        # The gate is a factor of the row, before or behind a product without a bias.
        row, linear = self._gate
        if not self._adapted:
            return self._kernels.gated_silu_mul(self._gate_up.apply(h), h, row)
        return self._kernels.silu_mul(self._gate_up.apply(h)).mul_(linear.apply(h).sigmoid_())
