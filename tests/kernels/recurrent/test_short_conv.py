"""Short convolutions against the whole sequence at once: chunks, decodes, saved states, and drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.recurrent.short_conv import ShortConv
from aengine.kernels.recurrent.state import BLOCK, DraftedBatch, DraftUpdates, RecurrentState, StateBatch

CHANNELS, MOST = 6, 3  # MOST: drafts of a row
NAN = float("nan")


@dataclass
class Part:
    """Tokens of a sequence in a step. Drafts beyond the first `right` ones are wrong."""

    sequence: int
    start: int
    count: int
    slot: int
    source: int
    saves: dict[int, int] = field(default_factory=dict)  # by the number of tokens before the end of the saved state
    read: int = -1  # as in `DraftedBatch`, like save
    save: tuple[int, int] = (0, 0)
    right: int = 0


class World:
    def __init__(self, width: int, seed: int, drafts: bool = False) -> None:
        torch.manual_seed(seed)
        self.width, self.drafts = width, drafts
        weight, bias = torch.randn(CHANNELS, width), torch.randn(CHANNELS)
        self.conv = ShortConv(weight, bias)
        self.x = torch.randn(4, 400, CHANNELS)
        padded = F.pad(self.x.transpose(1, 2), (width - 1, 0))
        self.expected = F.conv1d(padded, weight.unsqueeze(1), bias, groups=CHANNELS).transpose(1, 2)
        entries = 2 * MOST + 1
        empty = torch.full((12, entries, 0), NAN)
        updates = DraftUpdates(torch.full((12, entries, CHANNELS), NAN), empty, empty, empty)
        # Another layer lies between the slots.
        ring = torch.full((12, 2, width, CHANNELS), NAN)[:, 1]
        self.state = RecurrentState(ring, torch.empty(12, 0, 1, 1), updates if drafts else None)

    def run(self, decodes: Sequence[Part], chunks: Sequence[Part] = (), unused: int = 0) -> None:
        """Run a step and check its results. unused: decodes whose tokens belong to chunks."""
        parts = [*decodes, *chunks]
        rows: list[Tensor] = []
        positions, saves, wanted = [], [], []
        for part in parts:
            for i in range(part.count):
                true = part.sequence >= 0 and (part.read < 0 or i <= part.right)
                rows.append(self.x[part.sequence, part.start + i] if true else torch.randn(CHANNELS))
                wanted.append(self.expected[part.sequence, part.start + i] if true else None)
                positions.append(part.start + i)
                saves.append(part.saves.get(part.start + i + 1, 0))
        counts = torch.tensor([part.count for part in chunks], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int())) + len(decodes)

        def each(values: list[int], none: int, dtype: torch.dtype = torch.int32) -> Tensor:
            split = len(decodes)
            return torch.tensor([*values[:split], *[none] * unused, *values[split:]], dtype=dtype)

        drafted = None
        if self.drafts:
            drafted = DraftedBatch(
                each([part.read for part in parts], 0, torch.int64),
                each([part.save[0] for part in parts], 0, torch.int64),
                each([part.save[1] for part in parts], 0),
            )
        batch = StateBatch(
            each([part.slot for part in parts], -1),
            each([part.source for part in parts], 0),
            starts,
            torch.tensor(positions),
            torch.tensor(saves, dtype=torch.int32),
            len(decodes) + unused,
            drafted,
        )
        out = self.conv(torch.stack(rows), self.state, batch)
        for got, expected in zip(out, wanted, strict=True):
            if expected is not None:
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("seed", range(2))
def test_steps_mix_chunks_decodes_padding_and_saved_states(width: int, seed: int) -> None:
    world, rng = World(width, seed), random.Random(seed)
    done = dict.fromkeys(range(3), 0)
    saved: dict[int, tuple[int, int]] = {}  # by slot: the sequence and its tokens
    for _ in range(40):
        decodes, chunks = [], []
        for row in rng.sample(range(3), rng.randint(1, 3)):
            start, slot = done[row], row + 1
            source = slot if start else 0
            forks = [one for one, (sequence, known) in saved.items() if sequence == row and known == start]
            if forks:
                source = forks[0]
            count = 1 if start and rng.random() < 0.5 else rng.randint(1, min(70, 400 - start))
            ends = [end for end in range(start + 1, start + count + 1) if end % BLOCK == 0 or end == start + count]
            into = 4 + row if rng.random() < 0.6 and source != 4 + row else 0
            part = Part(row, start, count, slot, source, {rng.choice(ends): into} if into else {})
            saved |= {to: (row, end) for end, to in part.saves.items()}
            (decodes if count == 1 and start else chunks).append(part)
            done[row] = start + count
            if done[row] > 320:
                fork = next((known for sequence, known in saved.values() if sequence == row), 0)
                done[row] = fork
        decodes.insert(rng.randint(0, len(decodes)), Part(-1, 0, 1, 0, 0))
        chunks.insert(rng.randint(0, len(chunks)), Part(-1, 0, rng.randint(0, 2), 0, 0))
        unused = rng.randint(0, sum(part.count for part in chunks))
        world.run(decodes, chunks, unused)


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_rows_accept_any_number_of_drafts(width: int, seed: int) -> None:
    """A saved state is read by a prompt that continues from it."""
    world, rng = World(width, seed, drafts=True), random.Random(seed)
    lengths, reads = {}, {}
    for row in range(3):
        lengths[row] = reads[row] = rng.randint(1, 9)
        world.run([], [Part(row, 0, lengths[row], row + 1, 0)])
    for _ in range(25):
        decodes, chunks, kept = [], [], []
        for row in range(3):
            length, drafts = lengths[row], rng.randint(0, MOST)
            right = rng.randint(0, drafts)
            after = rng.randint(reads[row] + 1, length + 1 + right)
            kept.append((row, after))
            part = Part(row, length, 1 + drafts, row + 1, row + 1, {}, reads[row], (after, 5 + row), right)
            (chunks if drafts else decodes).append(part)
            reads[row], lengths[row] = length + 1, length + 1 + right
        world.run(decodes, chunks, rng.randint(0, sum(part.count for part in chunks)))
        world.run([], [Part(row, after, 5, 9, 5 + row) for row, after in kept[:1]])
