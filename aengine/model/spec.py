"""The specification of a decoder as data: its layers, and sizes that follow from them."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.cache.kv import KVLayer
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.experts.rule import GateClamp
from aengine.model.altup_spec import AltUpSpec
from aengine.model.norm_spec import LayerNorms
from aengine.model.ranks.shard import Shard
from aengine.model.recurrent_spec import MambaSpec, RecurrentSpec
from aengine.model.rope import QueryGrowth, RopeConfig

Activation = Literal["silu", "gelu", "relu2", "xielu"]  # gelu: its tanh approximation; relu2: the square of ReLU


# "head": a norm over each query or key head. "all": a norm over all query heads, and one over all key heads.
# "centred": a LayerNorm over each head, with a weight for each head.
QKNorm = Literal["none", "head", "all", "centred"]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Causal self-attention with grouped queries."""

    heads: int
    kv_heads: int
    head_dim: int
    # RMS norms before the rotation, if they are not centred.
    qk_norm: QKNorm = "none"
    qk_norm_offset: float = 0.0  # is added to the weights of these norms
    qk_norm_weight: bool = True  # whether the norms of single heads have weights
    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False  # whether checkpoints have q, k and v in one tensor
    rope: RopeConfig | None = RopeConfig()  # None: no rotation
    interleaved: bool = False  # whether neighbouring dimensions are rotated as pairs, instead of pairs from both halves
    growth: QueryGrowth | None = None  # of queries, after the rotation
    scale: float | None = None  # factor of attention scores; None: head_dim ** -0.5
    softcap: float | None = None  # cap of attention scores
    sinks: bool = False  # whether each head has one more score, of a key whose value is zero
    window: int | None = None  # positions that a query sees, its own included; None: all
    # Whether positions are cut into chunks as long as the window. A query sees those of its own chunk, up to its own.
    chunked: bool = False
    gate: bool = False  # whether the sigmoid of a gate multiplies the output of each query head
    gate_proj: bool = False  # whether gates have a separate projection; else each gate follows its head in q_proj
    v_norm: bool = False  # whether each value head has an RMS norm without a weight
    keys_are_values: bool = False  # whether values are the keys before their norm and rotation
    value_dim: int | None = None  # of value heads, if they are narrower than keys. The KV pool has zeros after them.
    value_scale: float = 1.0  # multiplies narrower values
    shares_kv_of: int | None = None  # the layer whose keys and values this layer reads; None: its own
    # Names in checkpoints.
    block: str = "self_attn"
    fused_name: str = "qkv_proj"
    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")

    @property
    def masked_window(self) -> int | None:
        """The window that kernels apply. Chunks need none, because they are sequences of their own."""
        return None if self.chunked else self.window

    def chunk_within(self, positions: int) -> int | None:
        """Return the positions of a chunk, or None if a context of so many positions is not cut."""
        return self.window if self.chunked and positions > (self.window or positions) else None

    def kv_layer(self, ranks: int) -> KVLayer:
        """Return the shape of a token's entry in the KV pool, on each rank."""
        return KVLayer(Shard(count=ranks).units(self.kv_heads), self.head_dim)

    @property
    def projected(self) -> int:
        """The number of projections besides queries: 2 (keys and values), 1 (keys) or 0."""
        return 0 if self.shares_kv_of is not None else 1 if self.keys_are_values else 2

    @property
    def gates_follow_heads(self) -> bool:
        """Whether each query head in the projection is followed by its gate."""
        return self.gate and not self.gate_proj

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def attended(self) -> int:
        """The width of the results of all query heads together."""
        return self.heads * (self.value_dim or self.head_dim)

    def parameters(self, hidden: int) -> int:
        projection = self._projected(self.heads, self.kv_heads)
        kept = self.shares_kv_of is None
        head = (1 + kept) * self.head_dim * self.qk_norm_weight
        wide = self.queries + kept * self.keys
        norms = {"none": 0, "head": head, "all": wide, "centred": wide}[self.qk_norm]
        biases = projection * self.qkv_bias + hidden * self.out_bias + self.heads * self.sinks
        return (projection + self.attended) * hidden + norms + biases

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        heads, kv_heads = Shard(count=ranks).units(self.heads), Shard(count=ranks).units(self.kv_heads)
        return (self._projected(heads, kv_heads), hidden), (hidden, heads * (self.value_dim or self.head_dim))

    def _projected(self, heads: int, kv_heads: int) -> int:
        """Return the width of the projection to so many heads."""
        widths = self.head_dim, self.value_dim or self.head_dim
        return (1 + self.gate) * heads * self.head_dim + kv_heads * sum(widths[: self.projected])


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Causal self-attention over latents (MLA): all heads derive keys and values from one vector per token."""

    heads: int
    unrotated: int  # dimensions of a key that are computed from the latent
    rotated: int  # all other dimensions of a key; they are rotated, shared by all heads, and stored next to the latent
    value_dim: int
    rank: int  # the width of the latent
    query_rank: int  # the width of the queries' latent; 0: queries have one projection
    bias: bool = False  # of the first and the last projection
    rope: RopeConfig = RopeConfig()
    interleaved: bool = True  # whether neighbouring dimensions are rotated as pairs, instead of pairs from both halves
    scale: float  # factor of attention scores
    window: None = None
    shares_kv_of: None = None

    @property
    def key_dim(self) -> int:
        return self.unrotated + self.rotated

    @property
    def latent(self) -> int:
        """The width of a token's entry in the KV pool."""
        return self.rank + self.rotated

    @property
    def head_dim(self) -> int:
        """The width of a query and a key as attention reads them."""
        return self.latent

    @property
    def queries(self) -> int:
        """The width of all queries together."""
        return self.heads * self.latent

    @property
    def values(self) -> int:
        """The width of the values of all heads together."""
        return self.heads * self.value_dim

    def kv_layer(self, ranks: int) -> KVLayer:
        """Return the shape of a token's entry in the KV pool. All ranks store the same."""
        return KVLayer(1, self.latent, vectors=1)

    @property
    def absorbed(self) -> int:
        """The number of weights of kv_b_proj, which makes K and V from latents. They stay in the model's dtype."""
        return self.heads * (self.unrotated + self.value_dim) * self.rank

    def parameters(self, hidden: int) -> int:
        first = self.query_rank + self.latent
        biases = (first + hidden) * self.bias
        return sum(n * k for n, k in self.linears(hidden)) + self.absorbed + self.query_rank + self.rank + biases

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        heads = Shard(count=ranks).units(self.heads)
        return (
            (self.query_rank + self.latent, hidden),
            (heads * self.key_dim, self.query_rank or hidden),
            (hidden, heads * self.value_dim),
        )


class AttentionBesideMambaSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention_beside_mamba"):
    """Attention and Mamba2 that read the same norm. Both results are multiplied by factors and added to x."""

    attention: AttentionSpec
    mamba: MambaSpec
    attention_scale: float = 1.0
    mamba_scale: float = 1.0

    def parameters(self, hidden: int) -> int:
        return self.attention.parameters(hidden) + self.mamba.parameters(hidden)

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        return self.attention.linears(hidden, ranks) + self.mamba.linears(hidden, ranks)


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """down(activation(gate) * up), or down(activation(up)) if it has no gate. Only xIELU has parameters."""

    inner: int
    activation: Activation = "silu"
    bias: bool = False
    fused: bool = False  # whether checkpoints have gate and up in one tensor
    gated: bool = True
    gate_scale: float = 1.0  # multiplies gates before their activation
    sparsity: float = 0.0  # the share of a token's gates that become 0, if they are distributed normally; needs GELU
    # Names in checkpoints. `ExpertsSpec` has the block's name of an expert that all tokens pass.
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
    shared_beside: bool = False  # whether the shared expert is beside the block, not within it
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
Mixer = AttentionSpec | LatentSpec | RecurrentSpec | AttentionBesideMambaSpec  # reads other tokens


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention, then a feed-forward part. Each adds its result to the residual stream. One of them may be missing.

    If they are parallel, both read the norm before attention, and the layer has no other norm.
    """

    attention: Mixer | None
    ffn: FFN | None
    norms: LayerNorms
    parallel: bool = False
    residual_scale: float = 1.0  # multiplies the result of each part
    input_width: int = 0  # of the layer's part of a second embedding, which is added last; 0: there is none
    scalar: bool = False  # whether a number of the checkpoint multiplies the layer's output
    altup: AltUpSpec | None = None  # None: the layer reads and returns one residual stream

    @property
    def attending(self) -> AttentionSpec | LatentSpec | None:
        """The attention that reads keys and values from pages, if the layer has one."""
        mixer = self.attention
        attention = mixer.attention if isinstance(mixer, AttentionBesideMambaSpec) else mixer
        return attention if isinstance(attention, AttentionSpec | LatentSpec) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The part with a state of fixed size, if the layer has one."""
        mixer = self.attention
        recurrent = mixer.mamba if isinstance(mixer, AttentionBesideMambaSpec) else mixer
        return recurrent if isinstance(recurrent, RecurrentSpec) else None

    def parameters(self, hidden: int) -> int:
        added = (2 * self.input_width + 1) * hidden if self.input_width else 0
        return sum(part.parameters(hidden) for part in (*self._parts, self.norms)) + added + self.scalar

    @property
    def _parts(self) -> tuple[Mixer | FFN | AltUpSpec, ...]:
        return tuple(part for part in (self.attention, self.ffn, self.altup) if part is not None)

    @property
    def is_pre_norm(self) -> bool:
        """Whether attention and feed-forward part have norms before them, but no norm and no scale after them."""
        norms = self.norms
        normed = norms.before_attention is not None and norms.before_ffn is not None  # not if they are parallel
        return normed and norms.after_attention is None and norms.after_ffn is None and self.residual_scale == 1.0

    def indivisible(self, ranks: int) -> str:
        """Return a description of a part that cannot be divided evenly among this many ranks. Empty: all can be."""
        attention, recurrent, ffn = self.attending, self.recurrent, self.ffn
        if recurrent is not None and (what := recurrent.indivisible(ranks)):
            return what
        if attention is not None and attention.heads % ranks:
            return f"{attention.heads} query heads"
        if (
            isinstance(attention, AttentionSpec) and attention.kv_heads % ranks and ranks % attention.kv_heads
        ):  # if there are fewer KV heads than ranks, several ranks have the same one
            return f"{attention.kv_heads} KV heads"
        if isinstance(ffn, MLPAndExpertsSpec):
            if ffn.mlp.inner % ranks:
                return f"{ffn.mlp.inner} columns of the MLP"
            ffn = ffn.experts
        if ffn is None:
            return ""
        if isinstance(ffn, MLPSpec):
            return f"{ffn.inner} columns of the MLP" if ffn.inner % ranks else ""
        if ffn.inner % ranks and ffn.count < ranks:  # ranks have columns of all experts, or some whole experts
            return f"{ffn.count} experts of {ffn.inner} columns"
        if ffn.shared is not None and ffn.shared.inner % ranks:
            return f"{ffn.shared.inner} columns of the shared expert"
        return ""

    def active_parameters(self, hidden: int) -> int:
        """Return how many weights one token uses."""
        unused = 0 if self.ffn is None else self.ffn.parameters(hidden) - self.ffn.active_parameters(hidden)
        return self.parameters(hidden) - unused

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each product that all tokens pass, on each rank."""
        added = ((self.input_width, hidden), (hidden, self.input_width)) if self.input_width else ()
        return tuple(linear for part in self._parts for linear in part.linears(hidden, ranks)) + added
