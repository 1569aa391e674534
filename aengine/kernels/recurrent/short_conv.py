"""A causal convolution of each channel whose state is its last inputs, in plain torch, on any device.

Its indices are computed once a step for all layers. It needs no host sync, so it can be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from aengine.kernels.recurrent.state import BLOCK, RecurrentState, StateBatch


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Where inputs of the convolution are: among the step's tokens, in a ring, or among accepted drafts. All [n, m]."""

    token: Tensor  # int64
    is_own: Tensor  # bool: it is this token's input
    slot: Tensor  # int64
    ring_row: Tensor  # int64
    in_ring: Tensor  # bool: it is in this row of the slot's ring
    entry: Tensor  # int64
    is_draft: Tensor | None  # bool: it is this entry of the slot's drafts. None: no step verifies drafts

    def column(self, i: int) -> _Inputs:
        """Return the i-th input of each row, [n]."""
        draft = None if self.is_draft is None else self.is_draft[:, i]
        return _Inputs(
            self.token[:, i], self.is_own[:, i], self.slot[:, i], self.ring_row[:, i], self.in_ring[:, i],
            self.entry[:, i], draft,
        )  # fmt: skip

    def read(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Return the inputs, [n, m, channels]. x: of the step's tokens."""
        ring = state.conv[self.slot, self.ring_row]
        found = torch.where(self.in_ring.unsqueeze(-1), ring, 0)
        found = torch.where(self.is_own.unsqueeze(-1), x[self.token], found)
        if self.is_draft is None or state.drafts is None:
            return found
        return torch.where(self.is_draft.unsqueeze(-1), state.drafts.inputs[self.slot, self.entry], found)


@dataclass(frozen=True, slots=True)
class _Written:
    """Rings that a step writes: the inputs that they hold, and their slots. Slot 0 takes those that nothing reads."""

    inputs: _Inputs  # [n, width]
    slots: Tensor  # [n, 1] int64
    rows: Tensor  # [n, width] int64


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The sequences of a batch, first those of decodes, then those of chunks. All [decodes + chunks]."""

    first: Tensor  # int64: the first token
    count: Tensor  # int64: tokens
    length: Tensor  # int64: tokens before the step
    read: Tensor  # int64: how many tokens the ring knows. Tokens from there to `length` are accepted drafts.
    sources: Tensor  # int64
    slots: Tensor  # int64; 0: padding or unused
    is_decoding: Tensor | None  # bool: as in `DraftedBatch`. None: no step verifies drafts

    @classmethod
    def from_batch(cls, batch: StateBatch) -> Self:
        decodes = torch.arange(batch.num_decodes, device=batch.starts.device)
        first = torch.cat((decodes, batch.starts[:-1].long()))
        count = torch.cat((torch.ones_like(decodes), batch.starts.diff().long()))
        slots = batch.slots.long().clamp(min=0).masked_fill(count == 0, 0)
        length = batch.positions[first.clamp(max=len(batch.positions) - 1)]
        read, sources, decoding = length, batch.sources.long(), None
        if batch.drafted is not None:
            decoding = batch.drafted.read >= 0
            read = torch.where(decoding, batch.drafted.read, length)
            sources = torch.where(decoding, slots, sources)
        return cls(first, count, length, read, sources, slots, decoding)

    def inputs(self, of: Tensor, positions: Tensor, width: int, entries: int, tokens: int) -> _Inputs:
        """Return where the inputs of some positions are. of: [n] the sequences. positions: [n, m]."""
        length, read, sources = (one[of].unsqueeze(-1) for one in (self.length, self.read, self.sources))
        there = (self.slots[of] > 0).unsqueeze(-1)
        own = there & (positions >= length)
        token = (self.first[of].unsqueeze(-1) + positions - length).clamp(0, tokens - 1)
        in_ring = there & (positions >= 0) & (positions < read) & (sources > 0)
        draft = None if self.is_decoding is None else there & (positions >= read) & (positions < length)
        slot = sources.expand_as(positions)
        return _Inputs(token, own, slot, positions % width, in_ring, positions % max(entries, 1), draft)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The indices of a step."""

    windows: _Inputs  # [tokens, width]: the token's own input first
    written: tuple[_Written, ...]
    drafts: tuple[Tensor, Tensor] | None  # [tokens] int64 each: slot and entry of a draft's input

    @classmethod
    def from_batch(cls, batch: StateBatch, width: int, entries: int) -> Self:
        """entries: of `DraftUpdates`; 0: there are none."""
        sequences, tokens, decodes = _Sequences.from_batch(batch), len(batch.positions), batch.num_decodes
        token = torch.arange(tokens, device=batch.positions.device)
        # A token after the last chunk belongs to no sequence: `of` is then the number of sequences.
        of = decodes + torch.searchsorted(batch.starts[1:].long().contiguous(), token, right=True)
        if decodes:
            is_decode = torch.zeros_like(token, dtype=torch.bool)
            is_decode[:decodes] = batch.slots[: min(decodes, tokens)] >= 0
            of = torch.where(is_decode, token, of)
        count = len(sequences.slots)
        exists = of < count
        of = of.clamp(max=count - 1)
        back = torch.arange(width, device=token.device)

        def inputs(seqs: Tensor, last: Tensor) -> _Inputs:
            return sequences.inputs(seqs, last.unsqueeze(-1) - back, width, entries, tokens)

        def written(seqs: Tensor, last: Tensor, slots: Tensor) -> _Written:
            return _Written(inputs(seqs, last), slots.unsqueeze(-1), (last.unsqueeze(-1) - back) % width)

        windows = inputs(of, batch.positions)
        windows = _Inputs(
            windows.token, windows.is_own & exists.unsqueeze(-1), windows.slot, windows.ring_row,
            windows.in_ring & exists.unsqueeze(-1), windows.entry, windows.is_draft,
        )  # fmt: skip
        every = torch.arange(count, device=token.device)
        last = sequences.length + sequences.count - 1
        if sequences.is_decoding is not None:  # only the first token is certain
            last = torch.where(sequences.is_decoding, sequences.length, last)
        rings = [written(every, last, sequences.slots)]
        # At most so many tokens save a ring.
        saving = batch.saves.long().masked_fill(~exists, 0).topk(min(tokens, tokens // BLOCK + count)).indices
        rings.append(written(of[saving], batch.positions[saving], batch.saves[saving].long()))
        if batch.drafted is None or sequences.is_decoding is None:
            return cls(windows, tuple(rings), None)
        after = batch.drafted.save_after - 1
        added = (after >= sequences.read) & (after < sequences.length + sequences.count) & (sequences.slots > 0)
        to = batch.drafted.save_slots.long().masked_fill(~(added & sequences.is_decoding), 0)
        rings.append(written(every, after, to))
        is_draft = exists & sequences.is_decoding[of] & (batch.positions > sequences.length[of])
        kept = sequences.slots[of].masked_fill(~is_draft, 0), batch.positions % max(entries, 1)
        return cls(windows, tuple(rings), kept)


class ShortConv:
    """The convolution of one layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [channels, width], the last column for the token itself. bias: [channels]. Filled before a call."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        """Return [tokens, channels], and update the state in place. Padding has any result. x: [tokens, channels].

        Raises ValueError if rows have drafts and the states have no memory for them.
        """
        if batch.drafted is not None and state.drafts is None:
            raise ValueError("the states have no memory for drafts")
        width, entries = self._weight.shape[1], 0 if state.drafts is None else state.drafts.entries
        plan = batch.plan(_Plan, lambda: _Plan.from_batch(batch, width, entries))
        total = torch.zeros_like(x, dtype=torch.float32) if self._bias is None else self._bias.float().expand(x.shape)
        for back in range(width):
            seen = plan.windows.column(back).read(x, state)
            total = torch.addcmul(total, seen.float(), self._weight[:, width - 1 - back].float())
        rings = [ring.inputs.read(x, state) for ring in plan.written]  # before anything is written
        for ring, values in zip(plan.written, rings):
            state.conv[ring.slots, ring.rows] = values
        if plan.drafts is not None and state.drafts is not None:
            state.drafts.inputs[plan.drafts] = x
        return total.to(x.dtype)
