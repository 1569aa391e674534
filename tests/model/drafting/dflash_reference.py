"""Random DFlash heads in the layouts in which heads are published, and what they compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tests.model.drafting.head_reference import CommonSettings, ReferenceLayers


@dataclass(frozen=True, kw_only=True)
class DFlashSettings(CommonSettings):
    """A head and the layout of its files, which name the layers whose outputs are read."""

    taps: tuple[int, ...] = (1, 3, 4)
    layers: int = 2
    qk_norm: bool = True
    block: int = 6
    mask: int = 95
    causal: bool = False
    unused: ClassVar[tuple[str, ...]] = ("verifier_lm_head.weight",)

    def norms(self) -> dict[str, int]:
        return {**super().norms(), "hidden_norm": self.hidden}

    def config(self, layer: dict[str, object]) -> dict[str, object]:
        outputs = [tap - 1 for tap in self.taps]
        section: dict[str, object] = {"mask_token_id": self.mask}
        config: dict[str, object] = {"block_size": self.block}
        if self.causal:
            section["causal"] = True
        if self.speculators:
            config |= {"speculators_model_type": "dflash", "transformer_layer_config": layer, **section}
            return config | {"draft_vocab_size": self.draft_vocab, "aux_hidden_state_layer_ids": outputs}
        section["target_layer_ids"] = outputs
        if self.draft_vocab != self.target_vocab:
            config["draft_vocab_size"] = self.draft_vocab
        return config | {"architectures": ["DFlashDraftModel"], "dflash_config": section, **layer}


class DFlashReference(ReferenceLayers):
    """One sequence, computed without pages."""

    def __init__(self, head: DFlashSettings, tensors: dict[str, Tensor], embedding: Tensor, output: Tensor) -> None:
        super().__init__(head, tensors, embedding, output)
        self.head = head

    def draft(self, states: Tensor, last_id: int, drafts: int) -> Tensor:
        """Return the logits of drafts after the token `last_id`, which follows the tokens of `states`."""
        head, context = self.head, len(states)
        seen = self.norm("hidden_norm", self.product("fc", states.double()))
        x = self.embedding[[last_id] + [head.mask] * drafts]
        visible = torch.ones(1 + drafts, context + 1 + drafts, dtype=torch.bool)
        if head.causal:
            visible = visible.tril(context)
        for i in range(head.layers):
            normed = self.norm(f"{head.layer(i)}.input_layernorm", x)
            k, v = (
                torch.cat((self.heads(i, part, seen, 0), self.heads(i, part, normed, context)), dim=1) for part in "kv"
            )
            x = self.attend_and_add(i, x, self.heads(i, "q", normed, context), k, v, visible)
        return self.norm("norm", x[1:]) @ self.output.T
