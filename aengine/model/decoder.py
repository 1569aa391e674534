"""The decoder: one class for every architecture. `ModelConfig` describes its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionBatch
from aengine.cache.kv import KVPool
from aengine.kernels.base import Kernels
from aengine.kernels.collective.base import Collective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.layers import LayerBuilder
from aengine.model.blocks.logits import Logits
from aengine.model.blocks.step import Block, ImageRows, States, Step, TokenTables
from aengine.model.blocks.variants.layer_inputs import LayerInputs
from aengine.model.config import ModelConfig
from aengine.model.drafting.base import DraftHead, TapStates
from aengine.model.drafting.dflash import DFlashHead
from aengine.model.drafting.mtp import MTPHead
from aengine.model.parameters import HEAD, Parameters
from aengine.model.ranks.sharded import finish_sums
from aengine.model.rope import PositionTables
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import LayerSpec
from aengine.model.towers.base import Tower
from aengine.model.towers.build import build_tower
from aengine.model.towers.parts import TowerOps


class Decoder:
    """A transformer decoder over a paged KV cache, with a draft head and a tower if the configuration says so.

    Before it can compute, a loader must fill and close its `groups`. `forward` and `logits` only enqueue work and never
    wait for the device, so that a CUDA graph can capture them. Call them under `torch.inference_mode()`.
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
        first_kv_layer: int = 0,
    ) -> None:
        """Build the layers without their weights.

        Args:
            device: None means "meta": shapes without memory.
            max_positions: An upper bound of positions. None means `config.max_position_embeddings`.
            kv_dtype: The dtype of the KV pool. None means `dtype`.
            ranks: The ranks that the model is spread over. None means that there is only one.
            first_kv_layer: The index of its first layer in the KV pool. A draft model shares the pool of its target.
        """
        device = device or torch.device("meta")
        make_parameters = partial(Parameters, kernels, dtype, device, config.quantized, kv_dtype, ranks=ranks)
        make = make_parameters(config.to_fp8, lora=config.lora, ignored_prefixes=config.ignored_prefixes)
        positions = max_positions or config.max_position_embeddings
        self.tables = PositionTables(positions, device)
        # Sequences that stay within longrope's trained context add this to their positions. See `rope_table`.
        self.near_shift = positions if config.needs_long_rope(positions) else 0
        self.ranks = ranks
        self.adapters = make.adapters
        # Whether ranks compute a step in two halves. Mixtures of experts would gain 2 % in prefill, but lose 3 % in
        # steps of one row. Recurrent layers need all tokens of a row at once.
        self._halves = not config.recurrent and all(
            isinstance(layer.ffn, MLPSpec) and layer.is_pre_norm for layer in config.layers
        )
        self._kernels = kernels
        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = device
        hidden, eps = config.hidden_size, config.rms_norm_eps
        head = None if config.tie_word_embeddings else HEAD
        bias = config.ends.logit_bias
        self.embed, self.head = make.embedding("model.embed_tokens", config.vocab_size, hidden, head, bias)
        self._after_embedding = config.ends.embedding_function(dtype)
        self.output = Logits(self.head, config.ends, self.adapters)
        inputs = config.ends.layer_inputs
        build = BuildContext(make, hidden, eps, self.tables, attention)
        self._inputs = None if inputs is None else LayerInputs(build, len(config.layers), inputs, dtype)
        layers = LayerBuilder(build, config.layers, first_kv_layer=first_kv_layer)
        self._layers: list[list[Block]] = []
        kinds: list[tuple[LayerSpec, list[tuple[tuple[int, ...], tuple[str, ...]]]]] = []
        for i, layer in enumerate(config.layers):
            before = len(make.groups)
            self._layers.append(layers.build(i))
            # A checkpoint may quantise single layers differently, or not at all. These layers need other kernels.
            stored = [(one.shape, one.dtypes) for group in make.groups[before:] for one in group.entries.values()]
            kinds.append((layer, stored))
        self._final_norm = make.specified_norm(config.ends.norm, hidden)
        self._classes = make.tensor("score.weight", config.labels, hidden) if config.labels else None
        # One layer of each kind, and the last one that attends, which returns only the wanted tokens.
        self._rehearsing = {kinds.index(kind) for kind in kinds} | {layers.last_with_attention}
        self._rehearsals_alone = False
        self.draft_head: DraftHead | DFlashHead | Decoder | None = None
        self.groups = make.groups
        if config.drafting and config.mtp is not None:
            own = replace(build, make=make_parameters(config.to_fp8 or self.rounds_drafts))  # no adapter changes it
            self.draft_head = MTPHead(own, config.mtp, self.embed, self.rounded_output(), len(config.paging))
            self.groups = [*make.groups, *own.make.groups]
        self.tower: Tower | None = None
        self._axes: Tensor | None = None  # the position that each frequency is multiplied with
        if config.tower is not None:  # whole on each rank; torch's kernels, as ours would be compiled for each size
            alone = Parameters(TorchKernels(), dtype, device, config.quantized)
            self.tower = build_tower(alone, config.tower, TowerOps(kernels.rotate, attention.attend_whole))
            self.groups = [*self.groups, *alone.groups]
            if (grid := config.tower.grid_rope) is not None:
                self._axes = torch.tensor(grid.axes(sum(grid.sections)), device=device)

    @property
    def rounds_drafts(self) -> bool:
        """Whether matrices of floats in draft heads become FP8 while they are loaded: drafts need not be exact."""
        return self._kernels.gains_by_fp8(self.device, self.dtype)

    def rounded_output(self) -> Logits:
        """Return the logits for drafts, which need not be exact. Adapters do not change them."""
        return Logits(self.head.rounded(self._kernels), self.config.ends, None)

    def keep_rehearsed_layers(self) -> None:
        """Drop all layers that a rehearsal leaves out. For the meta device."""
        kept = sorted(self._rehearsing)
        self._layers = [self._layers[i] for i in kept]
        self._rehearsing = set(range(len(kept)))

    @contextmanager
    def rehearsals(self) -> Iterator[None]:
        """Make every `forward` within this block a rehearsal."""
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
        taps: TapStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Return the normed hidden states of wanted tokens, and write K and V of all tokens into `kv`.

        Args:
            input_ids: [tokens] int64.
            positions: [tokens] int64. Sequences that stay within longrope's trained context add `near_shift`. If
                tokens have three positions (`ImageSpec.grid_rope`), they may also be [3, tokens].
            wanted: [n] int64, the tokens whose hidden states are returned, [n, hidden]. None means all, in order. After
                the last layer's attention, only these tokens are computed.
            rehearsal: Run only one layer of each kind. All kernels are loaded, and the results are undefined.
            sums: [tokens] float32, filled with a number that is finite only if K and V of the token are finite in every
                layer.
            adapters: [tokens] int32, the place of each token's adapter, 0 for none. None: no token has an adapter.
            states: The states of recurrent layers. They are updated.
            taps: Filled with the hidden states that a draft head reads, of all tokens. If it has the states after the
                last layer, that layer is computed for all tokens, too.
            images: The embeddings of images. The ids of their tokens must be in the vocabulary.
        """
        # `sums` adds up each token's output of the last attention. If K or V of a token is not finite, the residual of
        # the token is not finite either, and stays so in later layers. The last attention reads the token's own K and
        # V. One case is not noticed: an infinite key whose scores are all -inf, because its weight is 0.
        rehearsal = rehearsal or self._rehearsals_alone
        tokens = None if self.adapters is None else self.adapters.tokens
        if tokens is not None:  # before the first launch, because kernels that start early read it
            tokens.places = adapters
        end = len(self.config.layers)
        if taps is not None and not all(0 <= layer <= end for layer in taps.layers):
            raise ValueError(f"taps: layers {taps.layers} are not all from 0 to {end}")
        computed = None if taps is not None and end in taps.layers else wanted  # by the last layer
        by_token = None
        if positions.dim() > 1:
            if self._axes is None:
                raise ValueError("positions: the model takes one for each token")
            by_token = TokenTables(positions, self._axes)
            positions = torch.arange(positions.shape[1], device=positions.device)
        step = Step(positions, batch, kv, computed, sums, self.ranks, tokens, states, by_token=by_token)
        if self.ranks is not None:  # not in halves if there are adapters: they are set for all tokens at once
            self.ranks.begin_step(rehearsal, self._halves and adapters is None)
        x = self.embed(input_ids)
        if self._after_embedding is not None:
            x = self._after_embedding(x)
        deep = () if images is None else images.deep
        if len(deep) >= len(self.config.layers):
            raise ValueError(f"images: {len(deep)} layers are added to, but only {len(self.config.layers)} are there")
        if images is not None:
            if self.ranks is not None:
                finish_sums(self.ranks, x)
            x = x.index_copy(0, images.at, images.tokens.to(x.dtype))
        if self._inputs is not None:
            step.inputs = self._inputs(input_ids, x)
        for i, layer in enumerate(self._layers):
            if taps is not None:
                self._copy_taps(taps, i, x)
            if rehearsal and i not in self._rehearsing:
                continue
            for block in layer:
                if len(x):  # 0 if no token of the step is wanted
                    x = block(x, step)
            if images is not None and i < len(deep):
                if self.ranks is not None:
                    finish_sums(self.ranks, x)
                x = x.index_add(0, images.at, deep[i].to(x.dtype))
        if taps is not None:
            self._copy_taps(taps, end, x)
        if wanted is not computed and wanted is not None:
            x = x.index_select(0, wanted)
        return self._final_norm(x)

    def _copy_taps(self, taps: TapStates, layer: int, x: Tensor) -> None:
        """Copy the residual stream before a layer. Sums over ranks that compute it may still be running."""
        if layer in taps.layers:
            if self.ranks is not None:
                finish_sums(self.ranks, x)
            width = self.config.hidden_size
            first = taps.layers.index(layer) * width
            taps.states[:, first : first + width].copy_(x)

    @property
    def adapts_logits(self) -> bool:
        """Whether `logits` reads the tokens' adapters."""
        return self.adapters is not None and self.adapters.has(HEAD)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab] in the model's dtype.

        hidden [n, hidden]: from `forward`. adapters [n] int32: as in `forward`.
        """
        return self.output(hidden, adapters)

    def shard_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return the logits of this rank's part of the vocabulary, [n, outputs]. See `Head.shard_logits`."""
        return self.output.shard(hidden, adapters)

    def classes(self, hidden: Tensor) -> Tensor:
        """Return the logits of a classification head, [n, labels] in the model's dtype, on every rank.

        hidden [n, hidden]: from `forward`.
        """
        if self._classes is None:
            raise ValueError("the model has no classification head")
        return F.linear(hidden, self._classes)
