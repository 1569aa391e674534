"""Runs rows that verify drafts through a delta net. Each row follows a sequence, and its wrong drafts are noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.delta.base import DeltaHeads, DeltaNet
from aengine.kernels.recurrent.state import DraftedBatch, DraftUpdates
from tests.kernels.conftest import relative_error
from tests.kernels.delta.reference import WIDTH, Entry, World


@dataclass(slots=True)
class Row:
    """A row that has computed the first `length` tokens of a sequence. Its slot contains the first `read` of them."""

    sequence: int
    slot: int
    length: int
    read: int
    drafts: int = 0  # of the next step
    right: int = 0  # how many of these are the sequence's tokens; the others are noise
    save_after: int = 0
    save_slot: int = 0

    def advance(self) -> None:
        """Keep the right drafts of a step, and the token before them."""
        self.read = self.length + 1
        self.length += 1 + self.right


class DraftingWorld(World):
    """A world whose slots have memory for drafts. It is NaN until it is written."""

    def __init__(
        self,
        heads: DeltaHeads,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        most: int,
        rows: int = 8,
        kept: torch.dtype = torch.float32,
        decay: float = 1.0,
    ) -> None:
        """most: drafts of a row in a step. Slots below `rows` can be those of rows."""
        super().__init__(heads, lengths, dtype, device, kept, decay=decay)
        # As for states, another layer lies between the slots.
        entries = 2 * most + 1

        def empty(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows, 2, entries, *shape), float("nan"), dtype=kind, device=device)[:, 1]

        self.state.drafts = DraftUpdates(
            empty(heads.channels, kind=dtype),
            empty(heads.key_heads, heads.key_dim),
            empty(heads.value_heads, heads.value_dim),
            empty(heads.value_heads),
        )

    def prefill(self, net: DeltaNet, sequence: int, tokens: int, slot: int) -> Row:
        """Compute the first tokens of a sequence as a prompt. Returns its row."""
        self.verify(net, [], [Entry(sequence, tokens, slot, source=0)])
        return Row(sequence, slot, tokens, tokens)

    def begin(self, sequence: int, tokens: int, slot: int) -> Row:
        """Return a row that has computed the first tokens of a sequence, without running a prompt."""
        known, positions = self.sequences[sequence], torch.arange(max(0, tokens - WIDTH), tokens)
        self.state.conv[slot, positions % WIDTH] = known.qkv[positions]
        self.state.recurrence[slot] = known.states[tokens - 1].to(self.state.recurrence.dtype)
        return Row(sequence, slot, tokens, tokens)

    def verify(
        self,
        net: DeltaNet,
        rows: Sequence[Row],
        chunks: Sequence[Entry] = (),
        absent: int = 0,
        has_prompts: bool = True,
    ) -> list[float]:
        """Run a step over rows and chunks of prompts. Returns the errors of what the step computes and writes.

        Args:
            absent: how many decodes have slot -1.
            has_prompts: False: the chunks are padding.
        """
        rows = sorted(rows, key=lambda row: row.drafts > 0)
        decodes = [row for row in rows if not row.drafts]
        entries = [Entry(row.sequence, 1 + row.drafts, row.slot, row.slot, row.length) for row in rows]
        batch, _ = self.batch(entries[: len(decodes)], [*entries[len(decodes) :], *chunks], absent)

        def of_sequences(known: list[int], none: int, dtype: torch.dtype) -> Tensor:
            missing, prompts = [none] * absent, [none if has_prompts else 0] * len(chunks)
            values = known[: len(decodes)] + missing + known[len(decodes) :] + prompts
            return torch.tensor(values, dtype=dtype, device=self.device)

        batch.drafted = DraftedBatch(
            of_sequences([row.read for row in rows], -1, torch.int64),
            of_sequences([row.save_after for row in rows], 0, torch.int64),
            of_sequences([row.save_slot for row in rows], 0, torch.int32),
            has_prompts,
        )
        inputs = self.inputs([*entries, *chunks])
        first = 0
        for row in rows:
            for part in inputs:
                wrong = part[first + 1 + row.right : first + 1 + row.drafts]
                wrong.copy_(torch.randn(wrong.shape, generator=self._generator))
            first += 1 + row.drafts
        out = net(*inputs, self.state, batch)
        errors: list[float] = []
        first = 0
        for row in rows:
            good = 1 + row.right
            expected = self.sequences[row.sequence].out[row.length : row.length + good]
            errors.append(relative_error(out[first : first + good], expected))
            errors += self._errors(row.sequence, row.slot, row.length + 1)
            if row.save_slot and row.read < row.save_after <= row.length + good:
                errors += self._errors(row.sequence, row.save_slot, row.save_after)
            first += 1 + row.drafts
        for chunk in chunks:
            part, end = out[first : first + chunk.tokens], chunk.at + chunk.tokens
            first += chunk.tokens
            if chunk.sequence < 0:
                errors.append(float(part.abs().max()))
            else:
                errors.append(relative_error(part, self.sequences[chunk.sequence].out[chunk.at : end]))
                errors += self._errors(chunk.sequence, chunk.slot, end)
        return errors

    def _errors(self, sequence: int, slot: int, tokens: int) -> list[float]:
        """Return the errors of a slot that should contain the first tokens of a sequence."""
        known = self.sequences[sequence]
        positions = torch.arange(max(0, tokens - WIDTH), tokens)
        ring = self.state.conv[slot, positions % WIDTH].float() - known.qkv[positions].float()
        return [relative_error(self.state.recurrence[slot], known.states[tokens - 1]), float(ring.abs().max())]
