"""The specification of a layer as data: what reads other tokens, the feed-forward part, norms, and residual streams."""

from __future__ import annotations

import msgspec

from aengine.model.spec.attention import AttentionSpec, LatentSpec
from aengine.model.spec.feed_forward import FFN, MLPAndExpertsSpec, MLPSpec
from aengine.model.spec.recurrent import MambaSpec, RecurrentSpec


class NormSpec(msgspec.Struct, frozen=True):
    """An RMS norm over the hidden size, or a LayerNorm if it is centred."""

    name: str  # in checkpoints, within the layer or the model
    eps: float
    offset: float = 0.0  # is added to the weight
    centred: bool = False  # whether the mean is subtracted first. Then there is no offset.
    bias: bool = False  # only if it is centred

    def parameters(self, hidden: int) -> int:
        return (1 + self.bias) * hidden


class LayerNorms(msgspec.Struct, frozen=True):
    """The norms before and after attention, and before and after the feed-forward part. None: there is no such norm."""

    before_attention: NormSpec | None
    after_attention: NormSpec | None
    before_ffn: NormSpec | None
    after_ffn: NormSpec | None

    def parameters(self, hidden: int) -> int:
        norms = (self.before_attention, self.after_attention, self.before_ffn, self.after_ffn)
        return sum(norm.parameters(hidden) for norm in norms if norm is not None)


class AltUpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Several streams, of which a layer computes one (AltUp), and a product of low rank next to attention (LAuReL).

    A layer predicts each stream from all of them, computes the active one, and corrects all by the result.
    """

    count: int
    active: int  # the number of the stream that layers compute
    rank: int  # of the product next to attention
    scaled: bool = True  # whether the layer's second embedding reads the active stream times a weight
    first: bool = False  # whether the layer makes the streams from the embedding
    last: bool = False  # whether the layer returns one stream, which is the mean of all

    def parameters(self, hidden: int) -> int:
        coefficients = self.count * self.count * (1 + self.count) + self.count * hidden
        norms = 3 * hidden  # of the router, of the product next to attention, and the weight of the active stream
        return sum(n * k for n, k in self.linears(hidden)) + coefficients + norms

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product. Every rank has them whole."""
        others = self.count - 1
        first = ((others * hidden, hidden),) if self.first else ()
        last = ((hidden, hidden),) * others if self.last else ()
        return *first, (self.rank, hidden), (hidden, self.rank), *last


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
