"""Random EAGLE-3 and P-EAGLE heads in the layouts in which heads are published, and what they compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tests.model.drafting.head_reference import CommonSettings, ReferenceLayers


@dataclass(frozen=True, kw_only=True)
class HeadSettings(CommonSettings):
    """A head and the layout of its files."""

    draft_vocab: int = 40
    own_head: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask: int | None = None  # the token of masks in a P-EAGLE head
    in_section: bool = False  # whether the flags are in `eagle_config`
    unused: ClassVar[tuple[str, ...]] = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")

    def layer(self, i: int) -> str:
        return super().layer(i) if i or self.speculators else "midlayer"

    def inputs(self, i: int) -> int:
        return self.hidden if i else 2 * self.hidden

    def norms(self) -> dict[str, int]:
        norms = {**super().norms(), f"{self.layer(0)}.hidden_norm": self.hidden}
        if self.norm_before_fc:
            norms["input_norm"] = len(self.taps) * self.target_hidden
        return norms | {f"fc_norm.{i}": self.target_hidden for i in range(len(self.taps)) if self.fc_norm}

    def tensors(self, generator: torch.Generator) -> dict[str, Tensor]:
        width = len(self.taps) * self.target_hidden
        return {} if self.mask is None else {"mask_hidden": 3 * torch.randn(1, width, generator=generator)}

    def config(self, layer: dict[str, object]) -> dict[str, object]:
        flags: dict[str, object] = {"eagle_aux_hidden_state_layer_ids": list(self.taps)}
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            flags |= {name: True} if getattr(self, name) else {}
        if self.norm_before_residual != self.speculators:  # not the default of the layout
            flags["norm_before_residual"] = self.norm_before_residual
        config: dict[str, object] = {"draft_vocab_size": self.draft_vocab}
        if self.mask is not None:
            config["mask_token_id" if self.speculators else "ptd_token_id"] = self.mask
        if self.target_hidden != self.hidden:
            config["target_hidden_size"] = self.target_hidden
        config |= {"eagle_config": flags} if self.in_section else flags
        if self.speculators:
            kind = "eagle3" if self.mask is None else "peagle"
            return config | {"speculators_model_type": kind, "transformer_layer_config": layer}
        return config | {"architectures": ["LlamaForCausalLMEagle3"], **layer}


class Reference(ReferenceLayers):
    """One sequence. It keeps keys and values and computes one token at a time."""

    def __init__(self, head: HeadSettings, tensors: dict[str, Tensor], embedding: Tensor, output: Tensor) -> None:
        super().__init__(head, tensors, embedding, output)
        self.head = head
        empty = torch.empty(head.kv_heads, 0, head.head_dim, dtype=torch.float64)
        self.kept = [(empty, empty) for _ in range(head.layers)]

    def step(self, next_id: int, state: Tensor, recycled: bool) -> tuple[Tensor, Tensor]:
        """Compute the next position. Returns logits of the head's vocabulary, and the state for a recycled step."""
        head, state, position = self.head, state.double(), self.kept[0][0].shape[1]
        if not recycled:
            if head.fc_norm:
                parts = state.split(head.target_hidden)
                state = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)])
            if head.norm_before_fc:
                state = self.norm("input_norm", state)
            state = self.product("fc", state)
        first = head.layer(0)
        normed = self.norm(f"{first}.hidden_norm", state)
        inputs = torch.cat((self.norm(f"{first}.input_layernorm", self.embedding[next_id]), normed))[None]
        x = (normed if head.norm_before_residual else state)[None]
        for i in range(head.layers):
            inputs = self.norm(f"{head.layer(i)}.input_layernorm", x) if i else inputs
            q, *new = (self.heads(i, part, inputs, position) for part in "qkv")
            k, v = self.kept[i] = tuple(torch.cat(pair, dim=1) for pair in zip(self.kept[i], new, strict=True))
            x = self.attend_and_add(i, x, q, k, v, torch.ones(1, position + 1, dtype=torch.bool))
        hidden = self.norm("norm", x[0])
        return self.output @ hidden, hidden if head.norm_output else x[0]

    def mask(self) -> Tensor:
        """Compute the next position with a mask. Returns logits of the head's vocabulary."""
        if self.head.mask is None:
            raise ValueError("the head has no mask")
        return self.step(self.head.mask, self.t["mask_hidden"][0], recycled=False)[0]
