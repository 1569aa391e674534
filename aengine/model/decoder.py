"""The decoder: one class for every architecture, told apart by its `ModelConfig` alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionBatch
from aengine.cache.kv import KVPool
from aengine.kernels.base import Kernels
from aengine.model.config import ModelConfig
from aengine.model.layers import Layer, Linear, Parameters
from aengine.model.rope import rope_table


class Decoder:
    """A pre-norm transformer decoder over a paged KV cache.

    Its parameters are uninitialised until a loader fills `weights`, and calls `pack`. `forward` and `logits` enqueue
    only, without a host sync, so a decode step can be captured into a CUDA graph; run them under
    `torch.inference_mode()`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        attention: AttentionBackend,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Build on `device` (None: "meta", shapes alone) for positions below `max_positions` (None: the model's)."""
        device = device or torch.device("meta")
        make = Parameters(dtype, device)
        self.config = config
        self.kernels = kernels
        self.attention = attention
        self.dtype = dtype
        self.device = device
        self._embedding = make.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [Layer.build(make, f"model.layers.{i}", config, i) for i in range(config.num_layers)]
        windows = [config.window(i) for i in range(config.num_layers)]
        # One layer of each kind, and the last, behind whose attention only some tokens go on.
        self._rehearsing = {windows.index(window) for window in windows} | {config.num_layers - 1}
        self._final_norm = make.tensor("model.norm.weight", config.hidden_size)
        head = (
            self._embedding
            if config.tie_word_embeddings
            else make.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self._head = Linear(head, None)
        self._cos_sin = rope_table(
            config.rope, config.head_dim, max_positions or config.max_position_embeddings, device
        )
        self.weights = make.views  # checkpoint name -> the tensor (or rows of a fused one) that it fills
        self.num_parameters = sum(view.numel() for view in make.views.values())

    def thin_out(self) -> None:
        """Keep one layer of each kind, and the last: where nothing is computed, the others tell nothing new."""
        kept = sorted(self._rehearsing)
        self._layers = [self._layers[i] for i in kept]
        self._rehearsing = set(range(len(kept)))

    def pack(self) -> None:
        """Hand every matrix to the kernels in the layout they like best. `weights` is empty from then on."""
        self.weights = {}  # no second copy stays behind
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
        for linear in linears:
            linear.weight = self.kernels.pack(linear.weight)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVPool,
        wanted: Tensor | None = None,
        rehearsal: bool = False,
        sums: Tensor | None = None,
    ) -> Tensor:
        """input_ids, positions [tokens] int64 -> normed hidden states; K and V of all tokens go into `kv`.

        wanted [n] int64: the tokens whose hidden states are returned, [n, hidden]; None: all of them, in order. Behind
        the last layer's attention nobody looks at the others, so they go no further. rehearsal: leave out the layers
        that bring no kernels of their own; the numbers mean nothing, but whatever the device loads first is loaded.

        sums [tokens] float32: filled with a number for each token that is finite only if its K and V are, in every
        layer. It is the sum over what the last attention gives for the token. What a layer keeps of a token comes
        from its residual, which no later layer makes finite again, and the last attention reads K and V of the token
        itself. An infinite key whose own products are all -inf alone goes unnoticed: it has no weight.
        """
        kernels, eps = self.kernels, self.config.rms_norm_eps
        x = F.embedding(input_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            if rehearsal and i not in self._rehearsing:
                continue
            mixed = layer.attention.mix(
                x, layer.input_norm, positions, self._cos_sin, batch, kv.layer(i), kernels, self.attention
            )
            if sums is not None and i == len(self._layers) - 1:
                torch.sum(mixed, dim=-1, dtype=torch.float32, out=sums)
            if wanted is not None and i == len(self._layers) - 1:
                if not len(wanted):
                    return x[:0]
                mixed, x = mixed.index_select(0, wanted), x.index_select(0, wanted)
            x = kernels.linear_add(mixed, layer.attention.out.weight, layer.attention.out.bias, x)
            inner = layer.mlp.inner(x, layer.post_norm, eps, kernels)
            x = kernels.linear_add(inner, layer.mlp.down.weight, layer.mlp.down.bias, x)
        return kernels.rms_norm(x, self._final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] from `forward` -> [n, vocab] in the model's dtype."""
        return self.kernels.linear(hidden, self._head.weight, None)
