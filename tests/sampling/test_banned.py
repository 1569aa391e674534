"""bad_words: the last token of a banned sequence is masked if the output ends with the rest of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from aengine.sampling import Sampler
from aengine.sampling.masks import BannedSequences
from tests.sampling.build import CPU, draw, draw_one, new_row

LOGITS = [1.0, 4.0, 3.0, 2.0]  # likeliest first: 1, 2, 3, 0


def completes(output: Sequence[int], banned: Sequence[Sequence[int]], token: int) -> bool:
    """Define whether a token is banned."""
    return any([*output, token][-len(sequence) :] == list(sequence) for sequence in banned)


@pytest.mark.parametrize(
    ("banned", "output", "drawn"),
    [
        ([[1]], [], 2),
        ([[1], [2]], [3, 3], 3),
        ([[3, 1]], [3], 2),  # 3 was the last token
        ([[3, 1]], [1], 1),  # 3 was not the last token
        ([[3, 1]], [3, 0], 1),
        ([[3, 0, 1], [0, 2]], [3, 0], 3),
        ([[3, 0, 1]], [0], 1),  # the output is shorter than the rest of the sequence
        ([[1, 1]], [1], 2),
        ([[0, 1]], [], 1),  # the prompt, which ends in 0, is not the output
    ],
)
def test_the_next_likeliest_token_is_drawn_instead(banned: list[list[int]], output: list[int], drawn: int) -> None:
    assert draw_one(LOGITS, temperature=0, banned=banned, prompt=[0], output=output) == drawn


def test_many_steps_in_a_batch_with_other_rows() -> None:
    """Rows do not see each other's sequences, but all their own draws."""
    rng = random.Random(0)
    rows = 6
    banned = {
        row: [[rng.randrange(4) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 5))]
        for row in range(0, rows, 2)
    }
    sampler = Sampler(rows, 4, CPU)
    for row in range(rows):  # one after the other, so that the tables grow while rows are in use
        sampler.set_rows([new_row(row, temperature=1.0, seed=row, banned=banned.get(row, ()))])
    outputs: list[list[int]] = [[] for _ in range(rows)]
    free = Sampler(rows, 4, CPU)
    free.set_rows([new_row(row, temperature=1.0, seed=row) for row in range(rows)])
    torch.manual_seed(0)
    for step in range(200):
        logits = torch.randn(rows, 4)
        drawn = draw(sampler, logits, list(range(rows)), [1 + step] * rows).token_ids.tolist()
        unmasked = draw(free, logits, list(range(rows)), [1 + step] * rows).token_ids.tolist()
        for row, token in enumerate(drawn):
            possible = [one for one in range(4) if not completes(outputs[row], banned.get(row, ()), one)]
            if possible:
                assert token in possible
            if unmasked[row] in possible:
                assert token == unmasked[row]  # nothing else is touched
            outputs[row].append(token)


def test_a_row_that_comes_back_knows_its_output() -> None:
    """After a preemption, and after another request on the row had longer sequences."""
    sampler = Sampler(2, 4, CPU)
    sampler.set_rows([new_row(0, temperature=0, banned=[[1, 2, 3, 0, 1], [2]]), new_row(1, temperature=0)])
    sampler.set_rows([new_row(0, temperature=0, banned=[[2, 1]], prompt=[1, 1], output=[3, 2])])
    drawn = [draw(sampler, torch.tensor([LOGITS]), [0], [4 + step]).token_ids.item() for step in range(3)]
    assert drawn == [2, 2, 2]  # 2 was last; it stays so


def test_rows_without_bad_words_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mask", "add"):
        monkeypatch.delattr(BannedSequences, name)
    assert draw_one(LOGITS, temperature=0) == 1


def test_widths_in_any_order() -> None:
    for order in itertools.permutations([[[1]], [[0, 0, 2], [1]], [[3, 1]]]):
        sampler = Sampler(3, 4, CPU)
        for row, banned in enumerate(order):
            sampler.set_rows([new_row(row, temperature=0, banned=banned, output=[3])])
        drawn = draw(sampler, torch.tensor([LOGITS] * 3), [0, 1, 2], [2, 2, 2]).token_ids.tolist()
        assert drawn == [2, 2, 2]
