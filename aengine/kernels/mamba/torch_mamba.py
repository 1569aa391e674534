"""The reference for Mamba2, in plain torch and float32, for any device. Others are tested against it.

It needs a host sync, so it cannot be captured into a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.recurrent.decoding_rows import DecodingRows, most
from aengine.kernels.recurrent.short_conv import ShortConv
from aengine.kernels.recurrent.state import BLOCK, DraftedBatch, RecurrentState, StateBatch


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The inputs of the recurrence, float32."""

    queries: Tensor  # [tokens, key_heads, key_dim]: c
    keys: Tensor  # [tokens, key_heads, key_dim]: b
    corrections: Tensor  # [tokens, value_heads, value_dim]: step * x
    decays: Tensor  # [tokens, heads]: g
    skips: Tensor  # [tokens, value_heads, value_dim]: skip * x

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return type(self)(
            self.queries[rows], self.keys[rows], self.corrections[rows], self.decays[rows], self.skips[rows]
        )

    def add_to(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token to the state of each row. Returns the results [rows, heads, value_dim], and the states.

        s: [rows, heads, key_dim, value_dim].
        """
        s = _add(s, self.keys, self.corrections, self.decays)
        repeats = s.shape[1] // self.queries.shape[1]
        read = torch.einsum("rhkv,rhk->rhv", s, self.queries.repeat_interleave(repeats, 1))
        return read + self.skips, s

    def add_all_to(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Add consecutive tokens of one sequence to its state.

        Returns their results [n, heads, value_dim], and the state.

        s: [heads, key_dim, value_dim].
        """
        groups = self.keys.shape[1]
        q, k = self.queries.transpose(0, 1).unsqueeze(1), self.keys.transpose(0, 1).unsqueeze(1)  # [groups, 1, n, dim]
        v = self.corrections.transpose(0, 1).unflatten(0, (groups, -1))  # [groups, repeats, n, value_dim]
        total = self.decays.T.unflatten(0, (groups, -1)).cumsum(-1)  # [groups, repeats, n]
        s = s.unflatten(0, (groups, -1))
        later = torch.ones(len(self.keys), len(self.keys), dtype=torch.bool, device=s.device).triu(1)
        fades = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
        fade = total.exp().unsqueeze(-1)
        out = fade * (q @ s) + (q @ k.mT * fades) @ v
        left = (total[..., -1:] - total).exp().unsqueeze(-1)  # how much of each correction is left at the end
        s = s * fade[..., -1:, :] + k.mT @ (v * left)
        return out.flatten(0, 1).transpose(0, 1) + self.skips, s.flatten(0, 1)


def _add(s: Tensor, keys: Tensor, corrections: Tensor, decays: Tensor) -> Tensor:
    """Return states [rows, heads, key_dim, value_dim] after one more token of each row."""
    keys = keys.repeat_interleave(corrections.shape[1] // keys.shape[1], 1)
    return s * decays.exp()[..., None, None] + keys.unsqueeze(-1) * corrections.unsqueeze(-2)


class TorchMamba:
    """A `Mamba` that computes all decodes at once, and chunks one after the other, block by block."""

    def __init__(self, weights: MambaWeights) -> None:
        self._weights = weights
        self._conv = ShortConv(weights.conv, weights.conv_bias)

    def __call__(self, xbc: Tensor, z: Tensor, dt: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        weights, heads = self._weights, self._weights.heads
        filtered = F.silu(self._conv(xbc, state, batch).float())
        x, b, c = filtered.split((heads.values, heads.keys, heads.keys), dim=1)
        x = x.unflatten(1, (heads.value_heads, -1))
        step = F.softplus(dt.float() + weights.dt_bias.float())  # [tokens, heads]
        g = -weights.a_log.float().exp() * step
        b, c = (part.unflatten(1, (heads.key_heads, -1)) for part in (b, c))
        tokens = _Tokens(c, b, x * step.unsqueeze(-1), g, x * weights.skip.float().unsqueeze(-1))
        out = torch.zeros_like(x)
        if batch.drafted is None:
            _decode(out, tokens, state, batch)
        else:
            _decode_drafts(out, tokens, state, batch, batch.drafted)
        _prefill(out, tokens, state, batch)
        gated: Tensor = out.flatten(1) * F.silu(z.float())
        return gated.to(z.dtype)


def _decode(out: Tensor, tokens: _Tokens, state: RecurrentState, batch: StateBatch) -> None:
    """Write the decodes' results to out [tokens, value_heads, value_dim], and update their states."""
    rows = (batch.slots[: batch.num_decodes] > 0).nonzero().flatten()  # decodes that are not padding
    if not len(rows):
        return
    sources, saves = batch.sources[rows].long(), batch.saves[rows].long()
    s = state.recurrence[sources].float().masked_fill((sources == 0)[:, None, None, None], 0.0)
    results, s = tokens[rows].add_to(s)
    out[rows] = results
    kept, s = (saves > 0).nonzero().flatten(), s.to(state.recurrence.dtype)
    state.recurrence[batch.slots[rows].long()] = s
    state.recurrence[saves[kept]] = s[kept]


def _decode_drafts(
    out: Tensor, tokens: _Tokens, state: RecurrentState, batch: StateBatch, drafted: DraftedBatch
) -> None:
    """Like _decode(), for a step in which rows may have drafts. It computes the tokens of a row one after the other."""
    updates, recurrence = state.drafts, state.recurrence
    if updates is None:
        raise ValueError("the states have no memory for drafts")
    rows = DecodingRows.from_batch(batch, drafted)
    s = recurrence[rows.slots].float()
    length = batch.positions[rows.first]  # before the step

    def save(on: Tensor, positions: Tensor) -> None:
        saving = on[(rows.save_slots[on] > 0) & (rows.save_after[on] == positions + 1)]
        recurrence[rows.save_slots[saving]] = s[saving].to(recurrence.dtype)

    for j in range(most(length - rows.read)):  # accepted drafts
        on = (length - rows.read > j).nonzero().flatten()
        positions = rows.read[on] + j
        at = rows.slots[on], positions % updates.entries
        s[on] = _add(s[on], updates.keys[at], updates.corrections[at], updates.decays[at])
        save(on, positions)
    for j in range(most(rows.counts)):
        on = (rows.counts > j).nonzero().flatten()
        positions, own = length[on] + j, tokens[rows.first[on] + j]
        results, s[on] = own.add_to(s[on])
        out[rows.first[on] + j] = results
        save(on, positions)
        if j:
            at = rows.slots[on], positions % updates.entries
            updates.keys[at], updates.corrections[at], updates.decays[at] = own.keys, own.corrections, own.decays
        else:  # the first token is certain
            recurrence[rows.slots] = s.to(recurrence.dtype)


def _prefill(out: Tensor, tokens: _Tokens, state: RecurrentState, batch: StateBatch) -> None:
    """Write the results of chunks of prompts to out [tokens, value_heads, value_dim], and update their states."""
    reads = None if batch.drafted is None else batch.drafted.read.tolist()
    slots, sources, starts = batch.slots.tolist(), batch.sources.tolist(), batch.starts.tolist()
    for chunk in range(batch.num_chunks):
        at, end, index = starts[chunk], starts[chunk + 1], batch.num_decodes + chunk
        if at >= end or slots[index] <= 0 or (reads is not None and reads[index] >= 0):
            continue
        s = state.recurrence[sources[index]].float()
        s = s if sources[index] else torch.zeros_like(s)
        first, saves = int(batch.positions[at]) - at, batch.saves[at:end].tolist()
        begin = at
        while at < end:
            stop = min(end, at + BLOCK - (first + at) % BLOCK)
            results, s = tokens[at:stop].add_all_to(s)
            out[at:stop] = results
            if saves[stop - 1 - begin] > 0:
                state.recurrence[saves[stop - 1 - begin]] = s.to(state.recurrence.dtype)
            at = stop
        state.recurrence[slots[index]] = s.to(state.recurrence.dtype)
