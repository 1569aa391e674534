"""The specification of MLPs and mixtures of experts as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.kernels.experts.routing.router import Router
from aengine.kernels.experts.rule import GateClamp
from aengine.model.ranks.shard import Shard

Activation = Literal["silu", "gelu", "relu2", "xielu"]  # gelu: its tanh approximation; relu2: the square of ReLU


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """down(activation(gate) * up), or down(activation(up)) if it has no gate. Only xIELU has parameters."""

    inner: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False  # whether checkpoints have gate and up in one tensor
    gated: bool = True
    gate_scale: float = 1.0  # multiplies gates before their activation
    sparsity: float = 0.0  # the share of a token's gates that become 0, if they are distributed normally; needs GELU
    # Names in checkpoints. The block name of a shared expert is `ExpertsSpec.shared_name`.
    block: str = "mlp"
    fused_name: str = "gate_up_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def columns(self) -> int:
        """The width of gate and up together."""
        return (1 + self.gated) * self.inner

    def parameters(self, hidden: int) -> int:
        more = 2 if self.activation == "xielu" else 0
        return (self.columns + self.inner) * hidden + (self.columns + hidden) * self.bias + more

    def active_parameters(self, hidden: int) -> int:
        return self.parameters(hidden)

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        inner = Shard(count=ranks).units(self.inner)
        return ((1 + self.gated) * inner, hidden), (hidden, inner)


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A mixture of experts: a router chooses some of many MLPs for each token. One expert may be shared by all."""

    count: int
    inner: int  # columns of each expert
    router: Router
    correction: str = ""  # name of the correction of the router's scores, within the block; empty: there is none
    shared: MLPSpec | None = None  # the expert that every token passes
    clamp: GateClamp | None = None  # None: the gate is not clamped
    activation: Activation = "silu"
    gated: bool = True  # whether an expert has a gate. Without one, its activation is relu2.
    latent: int = 0  # the width to which tokens are projected before experts, and back after them; 0: no projections
    biases: bool = False  # whether the router and each expert have biases
    shared_gate: bool = False  # whether the sigmoid of a gate multiplies the shared expert's result
    weighs_inputs: bool = False  # whether a token's weight multiplies the expert's input, not its result; top_k is 1
    transposed: bool = False  # whether checkpoints store fused matrices transposed
    may_be_transposed: bool = False  # whether some files store fused matrices transposed
    alternating: bool = False  # whether columns of gate and up alternate in transposed matrices; else gates are first
    # Names in checkpoints.
    block: str = "mlp"
    router_name: str = "gate"
    shared_name: str = "shared_expert"
    shared_beside: bool = False  # whether the shared expert is next to the block, not within it
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def columns(self) -> int:
        """The width of an expert's gate and up together."""
        return (1 + self.gated) * self.inner

    @property
    def before_down(self) -> tuple[str, ...]:
        """The names of an expert's matrices before the last."""
        return (self.gate, self.up) if self.gated else (self.up,)

    def parameters(self, hidden: int) -> int:
        biases = self.count * (2 * self.inner + hidden) * self.biases
        return self._of_expert(hidden) * self.count + biases + self._for_all_tokens(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self._of_expert(hidden) * self.router.top_k + self._for_all_tokens(hidden)

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each product that all tokens pass, on each rank, without the router's."""
        shared = () if self.shared is None else self.shared.linears(hidden, ranks)
        return (*shared, (self.latent, hidden), (hidden, self.latent)) if self.latent else shared

    def _of_expert(self, hidden: int) -> int:
        return (2 + self.gated) * (self.latent or hidden) * self.inner

    def _for_all_tokens(self, hidden: int) -> int:
        shared = 0 if self.shared is None else self.shared.parameters(hidden)
        shared += 2 * hidden * self.latent
        return hidden * (self.count + self.shared_gate) + self.count * (bool(self.correction) + self.biases) + shared


class MLPAndExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mlp_and_experts"):
    """The sum of an MLP and a mixture of experts. Both have norms before and after them. The router has its own."""

    mlp: MLPSpec
    experts: ExpertsSpec

    def parameters(self, hidden: int) -> int:
        return self.mlp.parameters(hidden) + self.experts.parameters(hidden) + self._more(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self.mlp.parameters(hidden) + self.experts.active_parameters(hidden) + self._more(hidden)

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each product that all tokens pass, on each rank, without the router's."""
        return self.mlp.linears(hidden, ranks) + self.experts.linears(hidden, ranks)

    def _more(self, hidden: int) -> int:
        """Return the size of the four norms that `LayerNorms` does not count, and of a factor for each expert."""
        return 4 * hidden + self.experts.count


FFN = MLPSpec | ExpertsSpec | MLPAndExpertsSpec
