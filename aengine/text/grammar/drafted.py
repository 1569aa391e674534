"""Masks after drafts: what a grammar allows at the places of an output that verifies drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aengine.text.grammar.matcher import LLExecutor, Mask, Matcher


class Masks(NamedTuple):
    """The masks of a step. An output with k drafts has k + 1 places: after its tokens, and after each draft."""

    bits: Mask  # [places, words]: bit i % 32 of word i // 32 is set if token i may follow
    # How many drafts of each output may be accepted. Later places have no masks: all their bits are set, and their
    # draws must be dropped.
    usable: list[int]

    @classmethod
    def allowing_all(cls, drafts: Sequence[Sequence[int]], words: int) -> Masks:
        """Return masks of outputs with these drafts, with all bits set."""
        places = len(drafts) + sum(map(len, drafts))
        return cls(np.full((places, words), -1, dtype=np.int32), [0] * len(drafts))


@dataclass(frozen=True, slots=True)
class DraftedOutput:
    """An output that verifies drafts."""

    matcher: Matcher
    index: int  # of the output in `Masks.usable`
    place: int  # of its first mask in `Masks.bits`
    drafts: Sequence[int]  # at least one; ids of the vocabulary that do not end an output

    def may_begin(self, bits: Mask) -> bool:
        """Return whether the grammar allows the first draft. The mask of the first place must be filled."""
        word, bit = divmod(self.drafts[0], 32)
        return self.matcher.error is None and bool(int(bits[self.place, word]) >> bit & 1)

    def fill(self, masks: Masks, executor: LLExecutor) -> None:
        """Fill the masks of all places in this thread, and measure their cost."""
        begin = time.thread_time()
        fill_together([self], masks.bits, executor)
        self.settle(masks)
        self.matcher.note_cost(time.thread_time() - begin, 1 + masks.usable[self.index])

    def settle(self, masks: Masks) -> None:
        """Note how many drafts are usable, after `fill_together`. Forgets errors that the drafts have caused."""
        after = masks.bits[self.place + 1 : self.place + 1 + len(self.drafts)]
        filled = [bool(mask.any()) for mask in after]  # a mask allows at least one token
        usable = filled.index(False) if False in filled else len(filled)
        if self.matcher.error is not None:
            self.matcher.restart()
            usable = 0
        after[usable:] = -1
        masks.usable[self.index] = usable


def fill_together(outputs: Sequence[DraftedOutput], bits: Mask, executor: LLExecutor) -> None:
    """Fill the masks of all places of each output, until its grammar refuses a draft. The masks after it become 0.

    The drafts are taken back. A matcher gets an error if that fails, or if a mask takes too much to compute.
    """
    for output in outputs:
        bits[output.place + 1 : output.place + 1 + len(output.drafts)] = 0
    calls = [(output.matcher.advance(), output.place, list(output.drafts)) for output in outputs]
    executor.unsafe_compute_mask_ptr_with_draft_token(calls, bits.ctypes.data, bits.strides[0], len(bits))
