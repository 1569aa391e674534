"""The reference for rows that decode with drafts. It computes a row's tokens one after the other, all rows at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aengine.kernels.recurrent.decoding_rows import DecodingRows, most
from aengine.kernels.recurrent.state import DraftedBatch, DraftUpdates, RecurrentState, StateBatch

# Inputs of the convolution [rows, width, channels], the token's own last -> q, k, v [rows, value_heads, dim].
Filter = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class _States:
    """The states of decoding rows in float32 while a step adds tokens to them."""

    def __init__(self, rows: DecodingRows, state: RecurrentState, drafts: DraftUpdates) -> None:
        self.s = state.recurrence[rows.slots].float()  # [rows, value_heads, key_dim, value_dim]
        self._rows, self._state, self._drafts = rows, state, drafts

    def inputs(self, positions: Tensor) -> Tensor:
        """Return inputs of the convolution that earlier steps computed, [rows, n, channels]. positions: [rows, n]."""
        slots, drafts = self._rows.slots.unsqueeze(-1), self._drafts
        kept = self._state.conv[slots, positions % self._state.conv.shape[1]]
        drafted = drafts.inputs[slots, positions % drafts.entries]
        x = torch.where((positions >= self._rows.read.unsqueeze(-1)).unsqueeze(-1), drafted, kept)
        return x.masked_fill((positions < 0).unsqueeze(-1), 0.0)

    def fade(self, on: Tensor, decays: Tensor) -> Tensor:
        """Return the faded states of some rows, [n, value_heads, key_dim, value_dim]. on: [n] indices of rows."""
        return self.s[on] * decays.exp()[..., None, None]

    def add(self, on: Tensor, faded: Tensor, keys: Tensor, corrections: Tensor) -> None:
        """Add a token to faded states, and store them. keys, corrections: as in `DraftUpdates`."""
        repeats = corrections.shape[1] // keys.shape[1]
        self.s[on] = faded + keys.repeat_interleave(repeats, 1).unsqueeze(-1) * corrections.unsqueeze(-2)

    def write(self, on: Tensor, slots: Tensor, positions: Tensor, seen: Tensor) -> None:
        """Write the states of some rows to slots. positions [n]: of the last token. seen [n, width, channels]: inputs
        up to that token.
        """
        width = seen.shape[1]
        past = positions.unsqueeze(-1) + torch.arange(1 - width, 1, device=positions.device)
        self._state.conv[slots.unsqueeze(-1), past % width] = seen
        self._state.recurrence[slots] = self.s[on].to(self._state.recurrence.dtype)

    def save(self, on: Tensor, positions: Tensor, seen: Tensor) -> None:
        """Write the states of the rows that save one after this token. Arguments as in `write`."""
        slots = self._rows.save_slots[on]
        saving = ((slots > 0) & (self._rows.save_after[on] == positions + 1)).nonzero().flatten()
        self.write(on[saving], slots[saving], positions[saving], seen[saving])


def decode_drafts(
    filtered: Filter,
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    state: RecurrentState,
    batch: StateBatch,
    drafted: DraftedBatch,
) -> tuple[Tensor, Tensor]:
    """Compute all tokens of the sequences that decode, and update their slots.

    Returns the tokens [n] int64, and their results before the norm, [n, value_heads, value_dim] float32.

    Args:
        qkv: [tokens, channels]
        g: [tokens, value_heads] float32, like beta
    """
    updates = state.drafts
    if updates is None:
        raise ValueError("the states have no memory for drafts")
    rows = DecodingRows.from_batch(batch, drafted)
    states, width = _States(rows, state, updates), state.conv.shape[1]
    length = batch.positions[rows.first]  # before the step
    back = torch.arange(1 - width, 1, device=qkv.device)
    window = states.inputs(length.unsqueeze(-1) + back[:-1])
    for j in range(most(length - rows.read)):  # accepted drafts
        on, positions = (length - rows.read > j).nonzero().flatten(), rows.read + j
        at = rows.slots[on], positions[on] % updates.entries
        states.add(on, states.fade(on, updates.decays[at]), updates.keys[at], updates.corrections[at])
        states.save(on, positions[on], states.inputs(positions.unsqueeze(-1) + back)[on])
    tokens, results = [rows.first[:0]], [g.new_empty(0, *updates.corrections.shape[2:])]
    for j in range(most(rows.counts)):
        on = (rows.counts > j).nonzero().flatten()
        token, positions = rows.first[on] + j, length[on] + j
        seen = torch.cat((window[on], qkv[token].unsqueeze(1)), dim=1)  # [n, width, channels]
        q, k, v = filtered(seen)
        keys, faded = k[:, :: k.shape[1] // updates.keys.shape[2]], states.fade(on, g[token])
        corrections = beta[token].unsqueeze(-1) * (v - torch.einsum("rhkv,rhk->rhv", faded, k))
        states.add(on, faded, keys, corrections)
        tokens.append(token)
        results.append(torch.einsum("rhkv,rhk->rhv", states.s[on], q))
        states.save(on, positions, seen)
        if j:
            at = rows.slots[on], positions % updates.entries
            updates.inputs[at], updates.keys[at] = qkv[token], keys
            updates.corrections[at], updates.decays[at] = corrections, g[token]
        else:  # the first token is certain
            states.write(on, rows.slots, positions, seen)
        window[on] = seen[:, 1:]
    return torch.cat(tokens), torch.cat(results)
