"""The batched sampler. Each row's parameters are on the device, and stages run only for draws that need them.

The order of the stages is logit_bias, repetition/presence/frequency penalties, masks (min_tokens, bad_words,
allowed_token_ids, grammar), temperature, top_k, top_p, min_p, draw. No stage waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.sampling.draw import (
    DrawLogprobs,
    Noise,
    candidates,
    choose,
    draw_filtered,
    draw_greedy,
    draw_plain,
    raw_logprobs,
)
from aengine.sampling.groups import Groups, group
from aengine.sampling.masks import AllowedTokens, BannedSequences, TokenTable, allow_only
from aengine.sampling.noise import row_keys, token_codes
from aengine.sampling.parameters import (
    ALLOWED,
    BANNED,
    BIAS,
    FILTER,
    GRAMMAR,
    MIN_P,
    MIN_TOKENS,
    NOISE,
    PENALTY,
    RowParameters,
)
from aengine.sampling.penalties import TokenCounts, penalize
from aengine.sampling.upload import upload
from aengine.step_plan import NewRow

if TYPE_CHECKING:
    from aengine.sampling.fused import FusedDraw


@dataclass(slots=True)
class Draws:
    """The results of one call to `Sampler.sample`, on the device."""

    token_ids: Tensor  # [draws] int64; ids in the vocabulary, arbitrary if not finite
    finite: Tensor  # [draws] bool; False: the logits have NaN or +inf, or only -inf. With `counts`: one for each row.
    logprobs: DrawLogprobs | None  # None if no row requested any
    counts: Tensor | None = None  # [rows with drafts] int64: how many of its draws each keeps; None: no row has drafts
    proposed: Tensor | None = None  # [rows, proposals] int64: each row's drafts for its next step; None: not needed


class Kind(Enum):
    """The kind of draw that is enough for all rows of a batch."""

    SIMPLE = auto()  # at most a temperature: `draw_simple`
    FILTERED = auto()  # also top_k, top_p or min_p: `draw_filtered`
    ANY = auto()  # `sample`


class Sampler:
    """Draws a token for each row of a batch. A draw depends only on its row's parameters, logits, seed and position."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        most_draws: int | None = None,
        use_kernels: bool = True,
    ) -> None:
        """Args:
        most_draws: the most draws of a call. None: one for each row.
        use_kernels: whether our kernels draw on a GPU, and not torch's.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._parameters = RowParameters(max_rows, vocab_size, device)
        self._bias = TokenTable(max_rows, vocab_size, device)
        self._stops = TokenTable(max_rows, vocab_size, device)  # all with value -inf
        self._counts = TokenCounts(max_rows, vocab_size, device)
        self._banned = BannedSequences(max_rows, device)
        self._allowed = AllowedTokens(max_rows, vocab_size, device)
        self._tables = (  # each table, and the bit of the rows that use it
            (self._bias, BIAS),
            (self._stops, MIN_TOKENS),
            (self._counts, PENALTY),
            (self._banned, BANNED),
            (self._allowed, ALLOWED),
        )
        self._codes = token_codes(vocab_size, device)
        self._groups: Groups | None = None  # of the last batch
        self._fused: FusedDraw | None = None
        if use_kernels and device.type != "cpu":
            from aengine.sampling.fused import FusedDraw  # imports Triton, which a CPU does not need

            self._fused = FusedDraw(most_draws or max_rows, device)

    def set_rows(self, rows: Sequence[NewRow]) -> None:
        """Assign rows to new requests. Call this and `sample` in the order of the steps."""
        if not rows:
            return
        self._groups = None
        self._parameters.set_rows(rows)
        needs = self._parameters.needs
        originals = [new for new in rows if new.copy_of is None]
        self._bias.set_rows((new.row, new.params.logit_bias) for new in originals if needs[new.row] & BIAS)
        self._stops.set_rows(
            (new.row, dict.fromkeys(new.stop_ids, -torch.inf)) for new in originals if needs[new.row] & MIN_TOKENS
        )
        self._counts.allocate(new.row for new in rows if needs[new.row] & PENALTY)
        self._counts.set_rows([new for new in originals if needs[new.row] & PENALTY])
        self._banned.set_rows([new for new in originals if needs[new.row] & BANNED])
        self._allowed.set_rows(
            (new.row, new.params.allowed_token_ids or ()) for new in originals if needs[new.row] & ALLOWED
        )
        copies = [(new.row, new.copy_of) for new in rows if new.copy_of is not None]
        for table, need in self._tables:
            pairs = [pair for pair in copies if needs[pair[0]] & need]
            if pairs:
                table.copy_rows(*upload(np.array(pairs, dtype=np.int64).T, self._device))

    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        row_index: Tensor,
        positions: Tensor,
        masks: NDArray[np.int32] | None = None,
        counted: Tensor | None = None,
    ) -> Draws:
        """Draw a token for each row of logits, and count it if the row has penalties.

        Args:
            logits: [draws, vocab], contiguous; overwritten. float32, or on CUDA the model's dtype.
            rows: The row of each draw.
            row_index: Like `rows`, on the device, [draws] int64.
            positions: [draws] int64, the position of the drawn token in its sequence.
            masks: [structured draws, ceil(vocab / 32)] int32, the tokens that each draw with a grammar may take, in the
                order of the draws and the format of `allow_only`. It must not change afterwards. None: any token.
            counted: [draws] bool. Penalties and bad_words ignore the other draws afterwards. None: all are counted.
        """
        if self._groups is None or self._groups.rows != rows:
            fused = self._fused is not None
            self._groups = group(rows, self._parameters, self._vocab_size, self._device, fused=fused)
        bits = None if masks is None else upload(masks, self._device)
        if self._fused is None:
            draws = self._sample_in_stages(logits, self._groups, row_index, positions, bits)
        else:
            draws = self._sample_fused(self._fused, logits, self._groups, row_index, positions, bits)
        for index, memory in ((self._groups.penalized, self._counts), (self._groups.banned, self._banned)):
            if index is not None:
                memory.add(
                    _take(row_index, index),
                    _take(draws.token_ids, index),
                    None if counted is None else _take(counted, index),
                )
        return draws

    def kind(self, rows: list[int]) -> Kind:
        """Return the kind of draw that is enough for these rows. Every step calls this, so it must be cheap."""
        needs = 0
        for need in map(self._parameters.needs.__getitem__, rows):
            needs |= need
        if needs & ~NOISE == 0:
            return Kind.SIMPLE
        return Kind.FILTERED if needs & ~(NOISE | FILTER | MIN_P) == 0 else Kind.ANY

    def structured(self, rows: list[int]) -> list[int]:
        """Return which of these rows have a grammar, as indices."""
        return [i for i, row in enumerate(rows) if self._parameters.needs[row] & GRAMMAR]

    def remembers(self, rows: list[int]) -> bool:
        """Return whether the draws of a row depend on the tokens that it drew before: penalties and bad_words."""
        return any(self._parameters.needs[row] & (PENALTY | BANNED) for row in rows)

    def draw_simple(self, logits: Tensor, row_index: Tensor, positions: Tensor) -> Draws:
        """Draw like `sample`, for rows of kind SIMPLE.

        A CUDA graph can capture it, because the host takes no decision and shapes are fixed.

        logits: [draws, vocab], contiguous, of any dtype; only read. row_index, positions: [draws] int64.
        """
        if self._fused is not None:
            return Draws(*self._fused(logits, self._parameters, row_index, positions, filtered=False), None)
        picked = self._parameters.pick(row_index)
        if picked.temperature.any():  # on a CPU noise takes longer than the draw
            noise = self._noise(picked.seed_low, picked.seed_high, positions)
            token_ids = draw_plain(logits.float(), noise, picked.temperature, None)
        else:
            token_ids = draw_greedy(logits)
        return Draws(token_ids, logits.amax(dim=-1).isfinite(), None)

    def candidates(self, logits: Tensor, row_index: Tensor, positions: Tensor, first: int) -> Tensor:
        """Draw from this rank's tokens, if ranks divide the vocabulary; `choose` completes the draw.

        logits [draws, n] are for the tokens from `first` on; columns beyond the vocabulary are ignored. Returns the
        candidates [draws, 4] as float32, because ranks exchange floats. Only their bits matter; none is NaN.
        """
        valid = max(0, min(logits.shape[1], self._vocab_size - first))
        if self._fused is not None:
            found = self._fused.candidates(logits, self._parameters, row_index, positions, first, valid)
            return found.view(torch.float32)
        picked = self._parameters.pick(row_index)
        noise = self._noise(picked.seed_low, picked.seed_high, positions)
        of_these = noise._replace(codes=noise.codes[first : first + valid])
        return candidates(logits[:, :valid].float(), of_these, picked.temperature, first).view(torch.float32)

    def choose(self, found: Tensor) -> Draws:
        """Complete a draw. found: [draws, 4 * ranks], the `candidates` of all ranks in the order of the ranks."""
        parts = found.view(torch.int32).unflatten(1, (-1, 4))
        return Draws(*(choose(parts) if self._fused is None else self._fused.choose(parts)), None)

    def draw_filtered(self, logits: Tensor, row_index: Tensor, positions: Tensor) -> Draws:
        """Like `draw_simple`, for rows of kind SIMPLE or FILTERED."""
        if self._fused is not None:
            return Draws(*self._fused(logits, self._parameters, row_index, positions, filtered=True), None)
        picked = self._parameters.pick(row_index)
        noise = self._noise(picked.seed_low, picked.seed_high, positions)
        filters = (picked.top_k, picked.top_p, picked.log_min_p, self._vocab_size)
        token_ids = draw_filtered(
            logits.float(), noise, picked.temperature, *filters
        )  # at temperature 0 the likeliest token is always kept
        return Draws(token_ids, logits.amax(dim=-1).isfinite(), None)

    def _sample_in_stages(
        self, logits: Tensor, groups: Groups, row_index: Tensor, positions: Tensor, bits: Tensor | None
    ) -> Draws:
        finite = logits.amax(dim=-1).isfinite()  # the maximum is NaN if a logit is NaN
        raw = [raw_logprobs(_take(logits, block), groups.top_logprobs) for block in groups.logprobs_blocks]
        self._add_bias(logits, groups, row_index)
        for block in groups.penalized_blocks:
            rows = _take(row_index, block)
            _put(logits, block, penalize(_take(logits, block), self._counts.pick(rows), self._parameters.pick(rows)))
        self._mask(logits, groups, row_index, positions, bits)
        token_ids = self._draw(logits, groups, row_index, positions)
        return Draws(token_ids, finite, _gather_logprobs(token_ids, groups, raw) if raw else None)

    def _sample_fused(
        self,
        fused: FusedDraw,
        logits: Tensor,
        groups: Groups,
        row_index: Tensor,
        positions: Tensor,
        bits: Tensor | None,
    ) -> Draws:
        """Sample with kernels. Logits are copied only if a stage changes them, and only once."""
        if not groups.adjusts and bits is None:
            token_ids, finite = fused(logits, self._parameters, row_index, positions, filtered=groups.any_filter)
        else:
            finite = logits.amax(dim=-1).isfinite()  # before the masks, because these may leave no token
            adjusted = logits.to(torch.float32, copy=groups.logprobs is not None)
            self._add_bias(adjusted, groups, row_index)
            if groups.penalized is not None:
                picked = self._parameters.pick(row_index)
                fused.penalize(adjusted, groups.penalized, row_index, self._counts.cells, picked)
            self._mask(adjusted, groups, row_index, positions, bits)
            token_ids, _ = fused(adjusted, self._parameters, row_index, positions, filtered=groups.any_filter)
        if groups.logprobs is None:
            return Draws(token_ids, finite, None)
        return Draws(token_ids, finite, fused.logprobs(logits, groups.logprobs, token_ids, groups.top_logprobs))

    def _add_bias(self, logits: Tensor, groups: Groups, row_index: Tensor) -> None:
        """Add logit_bias in place."""
        if groups.biased is not None:
            self._bias.add_to(logits, groups.biased, _take(row_index, groups.biased))

    def _mask(self, logits: Tensor, groups: Groups, row_index: Tensor, positions: Tensor, bits: Tensor | None) -> None:
        """Apply the masks in place. bits: of the draws with a grammar."""
        if groups.min_tokens is not None:
            rows = _take(row_index, groups.min_tokens)
            too_early = _take(positions, groups.min_tokens)[:, None] < self._parameters.pick(rows).min_position
            self._stops.add_to(logits, groups.min_tokens, rows, where=too_early)
        if groups.banned is not None:
            self._banned.mask(logits, groups.banned, _take(row_index, groups.banned))
        for block in groups.allowed:
            _put(logits, block, allow_only(_take(logits, block), self._allowed.pick(_take(row_index, block))))
        if bits is not None:
            start = 0
            for block in groups.grammar:
                constrained = _take(logits, block)
                _put(logits, block, allow_only(constrained, bits[start : start + len(constrained)]))
                start += len(constrained)

    def _draw(self, logits: Tensor, groups: Groups, row_index: Tensor, positions: Tensor) -> Tensor:
        """Return ids [draws] int64. If any row is greedy, an argmax of all rows is cheaper than selecting some."""
        token_ids = draw_greedy(logits) if groups.greedy else torch.empty_like(row_index)
        for block in groups.plain:
            picked = self._parameters.pick(_take(row_index, block))
            noise = self._noise(picked.seed_low, picked.seed_high, _take(positions, block))
            log_min_p = picked.log_min_p if groups.plain_min_p else None
            _put(token_ids, block, draw_plain(_take(logits, block), noise, picked.temperature, log_min_p))
        for block in groups.filtered:
            picked = self._parameters.pick(_take(row_index, block))
            noise = self._noise(picked.seed_low, picked.seed_high, _take(positions, block))
            filters = (picked.top_k, picked.top_p, picked.log_min_p, groups.width)
            _put(token_ids, block, draw_filtered(_take(logits, block), noise, picked.temperature, *filters))
        return token_ids

    def _noise(self, seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> Noise:
        return Noise(self._codes, *row_keys(seed_low, seed_high, positions[:, None].int()))


def _take(tensor: Tensor, block: Tensor | None) -> Tensor:
    return tensor if block is None else tensor.index_select(0, block)


def _put(into: Tensor, block: Tensor | None, values: Tensor) -> None:
    if block is None:
        into.copy_(values)
    else:
        into.index_copy_(0, block, values)


def _gather_logprobs(token_ids: Tensor, groups: Groups, raw: list[tuple[Tensor, Tensor, Tensor]]) -> DrawLogprobs:
    """Return log-probabilities in the order of the draws, including the sampled tokens."""
    draws, k = len(groups.rows), groups.top_logprobs
    result = DrawLogprobs(
        sampled=torch.zeros(draws, dtype=torch.float32, device=token_ids.device),
        top_ids=torch.zeros((draws, k), dtype=torch.int64, device=token_ids.device),
        top=torch.zeros((draws, k), dtype=torch.float32, device=token_ids.device),
    )
    for block, (logprobs, top_ids, top) in zip(groups.logprobs_blocks, raw):
        sampled = logprobs.gather(1, _take(token_ids, block)[:, None]).squeeze(1)
        _put(result.sampled, block, sampled)
        _put(result.top_ids, block, top_ids)
        _put(result.top, block, top)
    return result
