"""The vocabulary of a draft head: the target's embedding and output matrix, and the ids of the head's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.model.blocks.build import BuildContext
from aengine.model.families.heads import HeadSpec
from aengine.model.groups import Entry, PlainTensor
from aengine.model.parameters import Embed
from aengine.model.quant.checks import check_range

# Tensors that only training reads, with the prefix that some files have.
UNUSED = tuple(prefix + name for prefix in ("", "model.") for name in ("t2d", "verifier_norm.", "verifier_lm_head."))


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """The embedding and the output matrix of the target. A head without its own uses them."""

    embed: Embed
    logits: Callable[[], Callable[[Tensor], Tensor]]  # makes the output matrix: [n, hidden] -> [n, vocabulary]
    first_kv_layer: int  # the number of layers that the target has in the KV pool
    near_shift: int = 0  # `Decoder.near_shift`


def make_token_ids(build: BuildContext, head: HeadSpec) -> Tensor:
    """Register the target's ids of the head's tokens. Files have the difference to the head's ids."""
    ids = torch.empty(head.draft_vocab_size, dtype=torch.int64, device=build.tables.device)
    name, last = "model.d2t", head.target_vocab_size - 1

    def ready() -> None:
        if not ids.is_meta:
            ids.add_(torch.arange(len(ids), device=ids.device))
        check_range(ids, [f"the sum of {name} and its index"], 0, last)

    entry = Entry((head.draft_vocab_size,), dtypes=("I64", "I32"), random_value=0)
    build.make.groups.append(PlainTensor(name, ids, ready, entry))
    return ids
