"""The decoder: one class for every architecture, told apart by the blocks that its `ModelConfig` describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionBatch
from aengine.cache.kv import KVPool
from aengine.kernels.base import Kernels
from aengine.kernels.collective.base import Collective
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.layers import LayerBuilder
from aengine.model.blocks.step import Block, States, Step
from aengine.model.blocks.variants.layer_inputs import LayerInputs
from aengine.model.config import ModelConfig
from aengine.model.parameters import HEAD, Parameters
from aengine.model.rope import PositionTables
from aengine.model.spec import LayerSpec, MLPSpec


class Decoder:
    """A transformer decoder over a paged KV cache.

    It computes once a loader has filled and closed its `groups`. `forward` and `logits` enqueue only, without a host
    sync, so a decode step can be captured into a CUDA graph; run them under `torch.inference_mode()`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        attention: AttentionBackend,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_positions: int | None = None,
        kv_dtype: torch.dtype | None = None,
        ranks: Collective | None = None,
    ) -> None:
        """Build on `device` (None: "meta", shapes alone) for positions below `max_positions` (None: the model's).

        kv_dtype: of the pool that keys and values will be kept in, None: `dtype`. ranks: those that the model is spread
        over, of which this is one; None: it is here alone.
        """
        device = device or torch.device("meta")
        make = Parameters(
            kernels, dtype, device, config.quantized, kv_dtype, config.to_fp8, ranks, config.lora,
            config.ignored_prefixes,
        )  # fmt: skip
        positions = max_positions or config.max_position_embeddings
        tables = PositionTables(positions, device)
        # What is added to positions of sequences that never leave the trained context; 0: nothing.
        self.near_shift = positions if config.far(positions) else 0
        self.ranks = ranks
        self.adapters = make.adapters
        # Not of mixtures: they gain 2 % in prefill, and lose 3 % in steps of one row (bench/README.md).
        # A row's state goes through all of its tokens at once.
        self._halves = not config.recurrent and all(
            isinstance(layer.ffn, MLPSpec) and layer.plain for layer in config.layers
        )
        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        hidden, eps = config.hidden_size, config.rms_norm_eps
        head = None if config.tie_word_embeddings else HEAD
        self._embed, self.head = make.embedding("model.embed_tokens", config.vocab_size, hidden, head)
        self._after_embedding = config.ends.embedding_function(dtype)
        inputs = config.ends.layer_inputs
        build = BuildContext(make, hidden, eps, tables, attention)
        self._inputs = None if inputs is None else LayerInputs(build, len(config.layers), inputs, dtype)
        layers = LayerBuilder(build, config.layers)
        self._layers: list[list[Block]] = []
        kinds: list[tuple[LayerSpec, list[tuple[tuple[int, ...], tuple[str, ...]]]]] = []
        for i, layer in enumerate(config.layers):
            before = len(make.groups)
            self._layers.append(layers.build(i))
            # A checkpoint may quantise single layers otherwise, or not at all. Those have kernels of their own.
            stored = [(one.shape, one.dtypes) for group in make.groups[before:] for one in group.entries.values()]
            kinds.append((layer, stored))
        self._final_norm = make.norm(config.ends.norm.name, hidden, config.ends.norm.eps, config.ends.norm.offset)
        self._classes = make.tensor("score.weight", config.labels, hidden) if config.labels else None
        # One layer of each kind, and the last, behind whose attention only some tokens go on.
        self._rehearsing = {kinds.index(kind) for kind in kinds} | {len(kinds) - 1}
        self._rehearsals_alone = False
        self.groups = make.groups

    def thin_out(self) -> None:
        """Keep one layer of each kind, and the last: where nothing is computed, the others tell nothing new."""
        kept = sorted(self._rehearsing)
        self._layers = [self._layers[i] for i in kept]
        self._rehearsing = set(range(len(kept)))

    @contextmanager
    def rehearsals(self) -> Iterator[None]:
        """Within, every `forward` is a rehearsal."""
        self._rehearsals_alone = True
        try:
            yield
        finally:
            self._rehearsals_alone = False

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVPool,
        wanted: Tensor | None = None,
        rehearsal: bool = False,
        sums: Tensor | None = None,
        adapters: Tensor | None = None,
        states: States | None = None,
    ) -> Tensor:
        """input_ids, positions [tokens] int64 -> normed hidden states; K and V of all tokens go into `kv`.

        positions: in the sequence, plus `near_shift` if that never leaves the trained context.

        wanted [n] int64: the tokens whose hidden states are returned, [n, hidden]; None: all of them, in order. Behind
        the last layer's attention nobody looks at the others, so they go no further. rehearsal: leave out the layers
        that bring no kernels of their own; the numbers mean nothing, but whatever the device loads first is loaded.

        sums [tokens] float32: filled with a number for each token that is finite only if its K and V are, in every
        layer. It is the sum over what the last attention gives for the token. What a layer keeps of a token comes
        from its residual, which no later layer makes finite again, and the last attention reads K and V of the token
        itself. An infinite key whose own products are all -inf alone goes unnoticed: it has no weight.

        adapters [tokens] int32: the place of each token's adapter, 0: it has none; None: no token has one.

        states: where a model with recurrent layers keeps theirs, which the step leaves as they are behind its tokens.
        """
        rehearsal = rehearsal or self._rehearsals_alone
        tokens = None if self.adapters is None else self.adapters.tokens
        if tokens is not None:  # before the first launch: kernels that start early read what comes of it
            tokens.places = adapters
        step = Step(positions, batch, kv, wanted, sums, self.ranks, tokens, states)
        if self.ranks is not None:  # adapters are those of all rows at once
            self.ranks.begin_step(rehearsal, self._halves and adapters is None)
        x = self._embed(input_ids)
        if self._after_embedding is not None:
            x = self._after_embedding(x)
        if self._inputs is not None:
            step.inputs = self._inputs(input_ids, x)
        for i, layer in enumerate(self._layers):
            if rehearsal and i not in self._rehearsing:
                continue
            for block in layer:
                if len(x):  # none: no token of the step is wanted
                    x = block(x, step)
        return self._final_norm(x)

    @property
    def adapts_logits(self) -> bool:
        """Whether `logits` looks at the tokens' adapters."""
        return self.adapters is not None and self.adapters.has(HEAD)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """hidden [n, hidden] from `forward` -> [n, vocab] in the model's dtype. adapters [n] int32: as in `forward`."""
        return self.head.whole(self.own_logits(hidden, adapters))

    def own_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """The same of the tokens that this rank has, as `Head.own` gives them: [n, outputs]."""
        if self.adapters is not None and self.adapters.has(HEAD) and adapters is not self.adapters.tokens.places:
            self.adapters.tokens.places = adapters
        ends = self.config.ends
        logits = self.head.own(hidden if ends.logit_scale == 1.0 else hidden * ends.logit_scale)
        if ends.logit_softcap is not None:
            logits = logits.div_(ends.logit_softcap).tanh_().mul_(ends.logit_softcap)
        return logits

    def classes(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] from `forward` -> [n, labels] in the model's dtype. Every rank has the whole of them."""
        if self._classes is None:
            raise ValueError("the model has no classification head")
        return F.linear(hidden, self._classes)
