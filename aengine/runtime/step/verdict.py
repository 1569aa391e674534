"""Verifies drafts. The target draws at the place of each draft and once more; a draft is kept while the draw equals it.

A draw depends on the tokens before it, the row's seed and the position, but not on drafts. So a row draws the same
tokens with and without drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aengine.runtime.step.rows import Rows
from aengine.sampling.draw import DrawLogprobs
from aengine.sampling.sampler import Draws
from aengine.sampling.upload import upload
from aengine.step_plan import StepPlan

# (places, counted) -> the draws of these places. counted [places] bool: whether the row keeps the token. None: all do.
Sample = Callable[[list[int], Tensor | None], Draws]


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The rows of a step that verify drafts. Row i draws at places first[i] .. first[i] + drafts[i] of the step."""

    rows: Tensor  # [n] int64
    first: Tensor  # [n] int64
    drafts: Tensor  # [n] int64, at least 1
    limits: Tensor  # [n] int64: the most drafts that each row may accept
    most: int  # the largest number of drafts
    places: range  # of all their draws
    numbers: list[int]  # `drafts` on the host

    @classmethod
    def of_plan(cls, plan: StepPlan, device: torch.device) -> DraftedRows | None:
        """Return the rows of a plan that verify drafts, or None if none does."""
        numbers = [drafts for drafts in plan.drafts if drafts]
        if not numbers:
            return None
        before = len(plan.decode) - len(numbers)  # rows without drafts come first
        drafts = np.array(numbers, dtype=np.int64)
        first = before + np.cumsum(drafts + 1) - (drafts + 1)
        rows = np.array(plan.decode[before:], dtype=np.int64)
        limits = np.array([plan.draft_limits.get(row, most) for row, most in zip(plan.decode[before:], numbers)])
        cells = upload(np.stack((rows, first, drafts, limits)), device)
        places = range(before, plan.decode_tokens)
        return cls(cells[0], cells[1], cells[2], cells[3], max(numbers), places, numbers)

    def gather(self, of_places: Tensor) -> Tensor:
        """Return the entries of each row's places, [n, most + 1]. Columns after a row's last place are arbitrary."""
        columns = torch.arange(self.most + 1, device=of_places.device)
        return of_places[(self.first[:, None] + columns).clamp_(max=len(of_places) - 1)]


def verify(drafted: DraftedRows, draws: Draws, rows: Rows) -> None:
    """Decide how many tokens each row keeps: the accepted drafts and the token after them.

    Sets `draws.counts`, and reduces `draws.finite` to one entry for each row. Sets the rows' lengths and last tokens.
    """
    drawn = drafted.gather(draws.token_ids)
    columns = torch.arange(drafted.most + 1, device=drawn.device)
    same = (drawn[:, :-1] == rows.drafts(drafted.rows, drafted.most)) & (columns[:-1] < drafted.limits[:, None])
    accepted = same.long().cumprod(dim=1).sum(dim=1)
    finite = drafted.gather(draws.finite) | (columns > accepted[:, None])
    rows.last_token[drafted.rows] = drawn.gather(1, accepted[:, None]).squeeze(1)
    rows.length.index_add_(0, drafted.rows, accepted - drafted.drafts)
    start, end = drafted.places.start, drafted.places.stop
    draws.finite = torch.cat((draws.finite[:start], finite.all(dim=1), draws.finite[end:]))
    draws.counts = accepted + 1


def draw_in_rounds(drafted: DraftedRows, draws: int, rows: Rows, sample: Sample) -> Draws:
    """Draw the places of each row one after the other, because penalties and bad_words depend on the tokens before.

    draws: the number of places of the step.
    """
    others = [place for place in range(draws) if place not in drafted.places]
    firsts = list(np.cumsum([drafted.places.start, *(number + 1 for number in drafted.numbers[:-1])]))
    kept: Tensor | None = None  # [n] bool: whether the row has accepted all drafts so far
    parts: list[tuple[list[int], Draws]] = []
    for column in range(drafted.most + 1):
        drawing = [i for i, number in enumerate(drafted.numbers) if number >= column]
        places = [int(firsts[i]) + column for i in drawing] + ([] if column else others)
        index = upload(np.array(drawing, dtype=np.int64), rows.device)
        part = sample(places, None if kept is None else kept[index])
        parts.append((places, part))
        if column < drafted.most:
            proposed = rows.next_tokens[column + 1].index_select(0, drafted.rows)
            same = torch.zeros_like(proposed, dtype=torch.bool)
            same[index] = part.token_ids[: len(drawing)] == proposed[index]
            same &= drafted.limits > column
            kept = same if kept is None else kept & same
    return _joined(parts, rows.device)


def _joined(parts: list[tuple[list[int], Draws]], device: torch.device) -> Draws:
    """Return draws in the order of their places."""
    order = upload(np.argsort([place for places, _ in parts for place in places]), device)
    token_ids = torch.cat([part.token_ids for _, part in parts])[order]
    finite = torch.cat([part.finite for _, part in parts])[order]
    logprobs = [part.logprobs for _, part in parts]
    if not any(logprobs):
        return Draws(token_ids, finite, None)
    width = max(one.top.shape[1] for one in logprobs if one is not None)
    whole = [
        _widened(one, width) if one is not None else _no_logprobs(len(places), width, device)
        for (places, _), one in zip(parts, logprobs, strict=True)
    ]
    sampled = torch.cat([one.sampled for one in whole])[order]
    top_ids, top = torch.cat([one.top_ids for one in whole])[order], torch.cat([one.top for one in whole])[order]
    return Draws(token_ids, finite, DrawLogprobs(sampled, top_ids, top))


def _widened(logprobs: DrawLogprobs, width: int) -> DrawLogprobs:
    pad = (0, width - logprobs.top.shape[1])
    top_ids, top = (torch.nn.functional.pad(field, pad) for field in (logprobs.top_ids, logprobs.top))
    return DrawLogprobs(logprobs.sampled, top_ids, top)


def _no_logprobs(draws: int, width: int, device: torch.device) -> DrawLogprobs:
    top = torch.zeros((draws, width), device=device)
    return DrawLogprobs(torch.zeros(draws, device=device), top.long(), top)
