"""The logits of a model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.model.lora.memory import AdapterMemory
from aengine.model.parameters import HEAD
from aengine.model.slots import Head
from aengine.model.spec.ends import EndsSpec


@dataclass(frozen=True, slots=True)
class Logits:
    """The output matrix, and what is done to logits after it."""

    head: Head
    ends: EndsSpec
    adapters: AdapterMemory | None

    def __call__(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab] for hidden states [n, hidden]. adapters: the place of each token's adapter, [n]."""
        return self.head.all_logits(self.shard(hidden, adapters))

    def shard(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """Return the logits of this rank's part of the vocabulary, [n, outputs]. See `Head.shard_logits`."""
        memory, ends = self.adapters, self.ends
        if memory is not None and memory.has(HEAD) and adapters is not memory.tokens.places:
            memory.tokens.places = adapters
        logits = self.head.shard_logits(hidden if ends.logit_scale == 1.0 else hidden * ends.logit_scale)
        if ends.logit_softcap is not None:
            logits = logits.div_(ends.logit_softcap).tanh_().mul_(ends.logit_softcap)
        return logits
