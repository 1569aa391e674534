"""Draws on CUDA: filters compute the lowest logit to keep of each row, then one kernel draws for all rows.

Penalties before the draw and log-probabilities after it have kernels as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.draw.cutoff import Cutoff
from aengine.kernels.draw.gumbel import Draw, choose
from aengine.kernels.draw.likeliest import likeliest
from aengine.kernels.draw.penalties import penalize_seen
from aengine.sampling.draw import DrawLogprobs
from aengine.sampling.parameters import ParameterColumns, RowParameters


class FusedDraw:
    """The kernels of a draw with their scratch memory. Only one stream may use them at a time."""

    def __init__(self, most_draws: int, device: torch.device) -> None:
        """most_draws: the most draws of a call."""
        self._most_draws = most_draws
        self._floors = Cutoff(most_draws, device)
        self._draw = Draw(most_draws, device)

    def __call__(
        self, logits: Tensor, parameters: RowParameters, row_index: Tensor, positions: Tensor, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        """Return drawn ids [draws] int64, and whether each draw's logits were finite, [draws] bool.

        logits: [draws, vocab] of any dtype, contiguous; only read. row_index, positions: [draws] int64. filtered: False
        if no row has top_k, top_p or min_p; the filters are then skipped. The host takes no decision, and
        shapes are fixed.
        """
        self._check(positions)
        floor = None
        if filtered:
            picked = parameters.pick(row_index)
            filters = picked.top_k[:, 0], picked.top_p[:, 0], picked.log_min_p[:, 0]
            floor = self._floors(logits, picked.temperature[:, 0], *filters)
        return self._draw(logits, *_noise_of(parameters), positions, row_index, floor)

    def candidates(
        self, logits: Tensor, parameters: RowParameters, row_index: Tensor, positions: Tensor, first: int, valid: int
    ) -> Tensor:
        """Call `Draw.candidates` with the parameters of the given rows."""
        self._check(positions)
        return self._draw.candidates(logits, *_noise_of(parameters), positions, row_index, first, valid)

    def _check(self, positions: Tensor) -> None:
        """Raise ValueError if the scratch memory has no room for these draws."""
        if len(positions) > self._most_draws:
            raise ValueError(f"{len(positions)} draws in a call, but there is memory for {self._most_draws}")

    def choose(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        return choose(candidates)

    def penalize(
        self, logits: Tensor, draws: Tensor, row_index: Tensor, cells: Tensor, picked: ParameterColumns
    ) -> None:
        """Apply `penalties.penalize` to logits[draws], in place.

        logits: [all draws, vocab] float32. draws: [n] int64. row_index: [all draws] int64. cells: of `TokenCounts`.
        """
        parameters = (picked.repetition[:, 0], picked.presence[:, 0], picked.frequency[:, 0])
        penalize_seen(logits, draws, row_index, cells, *parameters)

    def logprobs(self, logits: Tensor, draws: Tensor, token_ids: Tensor, k: int) -> DrawLogprobs:
        """Return log-probabilities of draws [n] int64. logits: [all draws, vocab] of any dtype; only read."""
        return DrawLogprobs(*likeliest(logits, draws, token_ids, k))


def _noise_of(parameters: RowParameters) -> tuple[Tensor, Tensor, Tensor]:
    """Return temperatures and seeds of all rows. The kernel indexes them itself, which saves a gather."""
    of_all = parameters.of_all
    return of_all.temperature[:, 0], of_all.seed_low[:, 0], of_all.seed_high[:, 0]
