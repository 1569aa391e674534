"""The choice of a token's experts and of their weights from the router's logits, with the reference in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Norm

# Added to each sum of weights before it divides, as in DeepSeek's reference: all sigmoids may be 0.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class Router:
    """How logits become experts and weights.

    Args:
        scoring: what a token's weights are: the softmax over all experts (Qwen, Mixtral, OLMoE), the softmax over the
            chosen ones (gpt-oss), or each logit's sigmoid (DeepSeek-V3, GLM). sigmoid_of_chosen (Llama 4): the same
            sigmoids, but the logits decide the choice. Sigmoids of large logits are all 1. sparsemixer (Phi-3.5-MoE):
            the softmax over the experts that are close to the chosen one, and are not chosen before it.
        jitter: of sparsemixer: half of the relative distance within which another expert is close.
        renormalise: divide the weights of a token by their sum.
        groups: number of equal groups of neighbouring experts. Experts are chosen from the best `chosen_groups` only.
        group_score: the best expert's score (DeepSeek-V2), or the sum of the best two (DeepSeek-V3).
        scale: a factor of all weights, applied last.
    """

    top_k: int
    scoring: Literal["softmax", "softmax_of_chosen", "sigmoid", "sigmoid_of_chosen", "sparsemixer"] = "softmax"
    renormalise: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    scale: float = 1.0
    jitter: float = 0.0

    def check(self, experts: int) -> None:
        """Raise ValueError if this cannot choose among so many experts."""
        if not 0 < self.top_k <= experts:
            raise ValueError(f"top_k is {self.top_k}: give 1 to {experts}, the number of experts")
        if not 0 < self.chosen_groups <= self.groups or experts % self.groups:
            raise ValueError(
                f"{self.chosen_groups} of {self.groups} groups of {experts} experts: give groups that divide"
            )
        size = experts // self.groups
        if self.top_k > self.chosen_groups * size:
            raise ValueError(
                f"top_k is {self.top_k}: {self.chosen_groups} groups have {self.chosen_groups * size} experts"
            )
        if self.groups > 1 and self.group_score == "top2" and size < 2:
            raise ValueError(f"{self.groups} groups of one expert have no best two: give fewer groups")


def route_reference(logits: Tensor, router: Router, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits float32 [tokens, experts] -> ids int32 [tokens, top_k], weights float32 [tokens, top_k], the best first.

    correction [experts]: added to the scores for the choice, not for the weights. Among equal scores the lowest id
    wins.
    """
    router.check(logits.shape[1])
    scores = logits.float()
    if router.scoring == "softmax":
        scores = scores.softmax(dim=-1)
    elif router.scoring == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if correction is None else scores + correction.float()
    if router.groups > 1:
        choice = _best_groups_only(choice, router)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(1, ids)
    if router.scoring == "sparsemixer":
        weights = _sparse_mixture(scores, ids, router.jitter)
    elif router.scoring == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    elif router.scoring == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if router.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return ids.to(torch.int32), weights * router.scale


def _sparse_mixture(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Return the weights of the chosen experts [tokens, top_k], the best first. logits: [tokens, experts]."""
    left, weights = logits, []
    for chosen in ids.unbind(1):
        best = logits.gather(1, chosen[:, None])
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, chosen[:, None]))
        left = left.scatter(1, chosen[:, None], float("-inf"))
    return torch.cat(weights, dim=1)


def _best_groups_only(choice: Tensor, router: Router) -> Tensor:
    """Set scores [tokens, experts] to -inf for the experts of all but the best groups."""
    grouped = choice.unflatten(1, (router.groups, -1))  # [tokens, groups, experts a group]
    counted = 1 if router.group_score == "max" else 2
    scores = grouped.topk(counted, dim=-1).values.sum(dim=-1)  # [tokens, groups]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen_groups]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
    kept: Tensor = grouped.masked_fill(~chosen[..., None], float("-inf"))
    return kept.flatten(1)


class TorchRoute:
    """The reference router: norm, logits in float32, then the choice, on any device."""

    def __init__(self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None) -> None:
        """weight [experts, hidden], correction and bias [experts]. All may be filled later."""
        self._weight = weight
        self._correction = correction
        self._router = router
        self._bias = bias

    def after(self, norm: Norm | None, x: Tensor, slots: Tensor, first_slot: int) -> tuple[Tensor, Tensor, Tensor]:
        h = x if norm is None else norm(x)
        logits = F.linear(h.float(), self._weight.float(), None if self._bias is None else self._bias.float())
        ids, weights = route_reference(logits, self._router, self._correction)
        return h, ids.masked_fill_((slots < first_slot).unsqueeze(1), -1), weights
