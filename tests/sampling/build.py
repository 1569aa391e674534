"""Helpers that make rows and draw from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Draws, Sampler
from aengine.step_plan import NewRow

CPU = torch.device("cpu")


def new_row(
    row: int = 0,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    banned: Sequence[Sequence[int]] = (),
    **sampling: object,
) -> NewRow:
    """Return a row whose known tokens are prompt and output."""
    return NewRow(
        row=row,
        params=params or SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=seed,
        stop_ids=stop_ids,
        prompt_len=len(prompt),
        tokens=[*prompt, *output],
        length=0,
        pages=[],
        banned=banned,
    )


def draw(sampler: Sampler, logits: Tensor, rows: list[int], positions: Sequence[int]) -> Draws:
    """Call `sample` with a copy of the logits."""
    return sampler.sample(
        logits.clone(), rows, torch.tensor(rows, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
    )


def draw_one(logits: Sequence[float], position: int | None = None, **row: object) -> int:
    """Return the id that a single row draws, by default at the first unknown position."""
    sampler = Sampler(1, len(logits), CPU)
    new = new_row(**row)  # type: ignore[arg-type]
    sampler.set_rows([new])
    position = len(new.tokens) if position is None else position
    return int(draw(sampler, torch.tensor([logits], dtype=torch.float32), [0], [position]).token_ids[0])


def draw_many(logits: Sequence[float], count: int, *, start: int = 1, **row: object) -> list[int]:
    """Return what one row draws from the logits at `count` consecutive positions."""
    sampler = Sampler(1, len(logits), CPU)
    sampler.set_rows([new_row(**row)])  # type: ignore[arg-type]
    rows = [0] * count
    repeated = torch.tensor([logits], dtype=torch.float32).repeat(count, 1)
    return draw(sampler, repeated, rows, range(start, start + count)).token_ids.tolist()
