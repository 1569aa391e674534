"""Runs sequences through a recurrent layer token by token in float64, and steps over parts of them.

Rows that verify drafts follow a sequence, and their wrong drafts are noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.base import Kernels
from aengine.kernels.delta.base import DeltaNet
from aengine.kernels.recurrent.state import DraftedBatch, DraftUpdates, RecurrentHeads, RecurrentState, StateBatch
from tests.kernels.conftest import relative_error

WIDTH = 4


@dataclass(slots=True)
class Sequence64:
    """The inputs of a sequence, and the expected results."""

    qkv: Tensor  # [tokens, channels], like the next ones in the model's dtype
    z: Tensor
    b: Tensor
    a: Tensor
    out: Tensor  # [tokens, values] float64
    states: Tensor  # [tokens, value_heads, key_dim, value_dim] float64: after each token


@dataclass(slots=True)
class Entry:
    """A part of a sequence in a step: its next `tokens` tokens. saves: slots by number of tokens of this part."""

    sequence: int  # -1: padding
    tokens: int
    slot: int
    source: int
    at: int = 0  # the position of the first token
    saves: dict[int, int] = field(default_factory=dict)


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


class World(ABC):
    """A layer, some sequences, and slots. These and their memory for drafts are NaN until they are written."""

    def __init__(
        self,
        heads: RecurrentHeads,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        most: int = 3,
        kept: torch.dtype = torch.float32,
        decay: float = 1.0,
    ) -> None:
        """most: drafts of a row in a step. decay: how strong the gates decay the state."""
        self._generator = torch.Generator().manual_seed(sum(lengths) + heads.channels)
        self.heads, self.dtype, self.device = heads, dtype, device
        self._narrow, self._decay = dtype != torch.float32 or kept != torch.float32, decay
        log = torch.tensor(decay).log().to(dtype).to(device)
        conv, a_log = self._random(heads.channels, WIDTH, scale=0.5), self._random(heads.value_heads, scale=0.5) + log
        self._make_weights(conv, a_log, self._random(heads.value_heads))
        self.sequences = [self._sequence(length) for length in lengths]
        matrices, entries = (heads.value_heads, heads.key_dim, heads.value_dim), 2 * most + 1

        def empty(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            """Slots are not adjacent, as if other layers were between them."""
            return torch.full((16, 2, *shape), float("nan"), dtype=kind, device=device)[:, 1]

        drafts = DraftUpdates(
            empty(entries, heads.channels, kind=dtype),
            empty(entries, heads.key_heads, heads.key_dim),
            empty(entries, heads.value_heads, heads.value_dim),
            empty(entries, heads.value_heads),
        )
        conv = empty(WIDTH, heads.channels, kind=dtype)
        self.state = RecurrentState(conv, empty(*matrices, kind=kept), drafts)

    @staticmethod
    def _filtered(x: Tensor, conv: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        """Return SiLU of the convolution of x [tokens, channels], in float64."""
        padded = F.pad(x.double(), (0, 0, WIDTH - 1, 0))
        return F.silu(torch.stack([(padded[t : t + WIDTH] * conv.double().T).sum(0) for t in range(len(x))]) + bias)

    @abstractmethod
    def _make_weights(self, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> None: ...

    @abstractmethod
    def reference(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the definition token by token: results [tokens, values], and the state after each token."""

    @abstractmethod
    def net(self, kernels: Kernels) -> DeltaNet:
        """Return the layer. Mamba2 has the arguments of a delta net, and does not use b."""

    @property
    @abstractmethod
    def of_reference(self) -> float:
        """The largest error of the reference in torch."""

    @property
    @abstractmethod
    def of_kernels(self) -> float:
        """The largest error of the Triton kernels."""

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(self.dtype).to(self.device)

    def _sequence(self, tokens: int) -> Sequence64:
        heads = self.heads
        qkv, z = self._random(tokens, heads.channels), self._random(tokens, heads.values)
        b, a = self._random(tokens, heads.value_heads), self._random(tokens, heads.value_heads)
        return Sequence64(qkv, z, b, a, *self.reference(qkv, z, b, a))

    def batch(self, decodes: Sequence[Entry], chunks: Sequence[Entry], absent: int = 0) -> tuple[StateBatch, int]:
        """Return the batch and the number of tokens. absent: how many decodes have slot -1."""
        entries = [*decodes, *chunks]
        missing = [-1] * absent
        slots = [e.slot for e in decodes] + missing + [e.slot for e in chunks]
        sources = [e.source for e in decodes] + missing + [e.source for e in chunks]
        starts = [len(decodes)]
        for chunk in chunks:
            starts.append(starts[-1] + chunk.tokens)
        positions = [entry.at + i for entry in entries for i in range(entry.tokens)]
        saves = [entry.saves.get(i + 1, 0) for entry in entries for i in range(entry.tokens)]

        def on_device(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        wide = on_device(positions, torch.int64)
        batch = StateBatch(
            on_device(slots), on_device(sources), on_device(starts), wide, on_device(saves), len(decodes) + absent
        )
        return batch, len(positions)

    def inputs(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of all tokens as slices of one product, so rows are not adjacent."""
        heads, rows = self.heads, []
        for entry in entries:
            if entry.sequence < 0:
                rows.append(torch.full((entry.tokens, self._columns), 3.0, dtype=self.dtype, device=self.device))
                continue
            s, tokens = self.sequences[entry.sequence], slice(entry.at, entry.at + entry.tokens)
            rows.append(torch.cat([part[tokens] for part in (s.qkv, s.z, s.b, s.a)], dim=1))
        parts = (heads.channels, heads.values, heads.value_heads, heads.value_heads)
        qkv, z, b, a = torch.cat(rows).split(parts, dim=1)
        return qkv, z, b, a

    @property
    def _columns(self) -> int:
        return self.heads.channels + self.heads.values + 2 * self.heads.value_heads

    def run(
        self, net: DeltaNet, decodes: Sequence[Entry], chunks: Sequence[Entry] = (), absent: int = 0
    ) -> tuple[Tensor, list[float]]:
        """Run a step. Return all results, and each entry's errors of results and states."""
        batch, _ = self.batch(decodes, chunks, absent)
        out = net(*self.inputs([*decodes, *chunks]), self.state, batch)
        at, errors = 0, []
        for entry in [*decodes, *chunks]:
            part = out[at : at + entry.tokens]
            at += entry.tokens
            if entry.sequence < 0:
                errors.append(float(part.abs().max()) if entry.tokens else 0.0)
            elif entry.tokens:
                sequence, end = self.sequences[entry.sequence], entry.at + entry.tokens
                errors.append(relative_error(part, sequence.out[entry.at : end]))
                places = {**entry.saves, entry.tokens: entry.slot}
                saved = [(entry.at + count - 1, slot) for count, slot in places.items()]
                saved += [(end - 1, entry.saves[entry.tokens])] if entry.tokens in entry.saves else []
                errors += [relative_error(self.state.recurrence[to], sequence.states[of]) for of, to in saved]
        return out, errors

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
