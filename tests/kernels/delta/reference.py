"""Runs sequences through a delta net token by token in float64, and steps over parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.delta.base import DeltaHeads, DeltaNet, DeltaWeights
from aengine.kernels.recurrent.state import RecurrentState, StateBatch
from tests.kernels.conftest import relative_error

WIDTH = 4
EPS = 1e-6


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


class World:
    """A layer, some sequences, and slots that are NaN until they are written."""

    def __init__(
        self,
        heads: DeltaHeads,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        kept: torch.dtype = torch.float32,
        slots: int = 16,
        decay: float = 1.0,
    ) -> None:
        """decay: how strong the gates decay the state."""
        self._generator = torch.Generator().manual_seed(sum(lengths) + heads.channels)
        self.heads, self.dtype, self.device = heads, dtype, device
        self._make_weights(decay)
        self.sequences = [self._sequence(length) for length in lengths]
        # Slots are not adjacent, as if other layers were between them.
        conv = torch.full((slots, 2, WIDTH, heads.channels), float("nan"), dtype=dtype, device=device)
        matrices = (heads.value_heads, heads.key_dim, heads.value_dim)
        recurrence = torch.full((slots, 2, *matrices), float("nan"), dtype=kept, device=device)
        self.state = RecurrentState(conv[:, 1], recurrence[:, 0])

    def _make_weights(self, decay: float) -> None:
        heads = self.heads
        self.weights = DeltaWeights(
            heads,
            self._random(heads.channels, WIDTH, scale=0.5),
            self._random(heads.value_heads, scale=0.5) + torch.tensor(decay).log().to(self.dtype).to(self.device),
            self._random(heads.value_heads),
            self._random(heads.value_dim),
            EPS,
        )

    def _expected(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return results [tokens, values], and the state after each token, in float64."""
        return reference(self.weights, qkv, z, b, a)

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(self.dtype).to(self.device)

    def _sequence(self, tokens: int) -> Sequence64:
        heads = self.heads
        qkv, z = self._random(tokens, heads.channels), self._random(tokens, heads.values)
        b, a = self._random(tokens, heads.value_heads), self._random(tokens, heads.value_heads)
        return Sequence64(qkv, z, b, a, *self._expected(qkv, z, b, a))

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


def reference(weights: DeltaWeights, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the definition token by token: results [tokens, values], and the state after each token."""
    heads, repeats = weights.heads, weights.heads.value_heads // weights.heads.key_heads
    tokens, conv = len(qkv), weights.conv.double()
    padded = F.pad(qkv.double(), (0, 0, WIDTH - 1, 0))
    filtered = F.silu(torch.stack([(padded[t : t + WIDTH] * conv.T).sum(0) for t in range(tokens)]))
    q, k, v = filtered.split((heads.keys, heads.keys, heads.values), dim=1)
    q, k = (x.view(tokens, heads.key_heads, -1).repeat_interleave(repeats, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.view(tokens, heads.value_heads, -1)
    fade = (-weights.a_log.double().exp() * F.softplus(a.double() + weights.dt_bias.double())).exp()
    beta = b.double().sigmoid()
    s = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64, device=qkv.device)
    outs, states = [], []
    for t in range(tokens):
        s = s * fade[t, :, None, None]
        answer = torch.einsum("hkv,hk->hv", s, k[t])
        s = s + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - answer))
        outs.append(torch.einsum("hkv,hk->hv", s, q[t]) * heads.key_dim**-0.5)
        states.append(s)
    out = torch.stack(outs)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
    return out.flatten(1) * F.silu(z.double()), torch.stack(states)
