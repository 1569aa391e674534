"""Draws tokens if each rank has logits for a part of the vocabulary. Ranks exchange one candidate a row, not logits."""

from __future__ import annotations

from torch import Tensor

from aengine.model.decoder import Decoder
from aengine.sampling.sampler import Draws, Kind, Sampler


def draw_from_shards(decoder: Decoder, sampler: Sampler, own: Tensor, rows: Tensor, positions: Tensor) -> Draws:
    """Like `Sampler.draw_simple`, but draw from the logits of all ranks. Every rank returns the same draws.

    own [draws, n]: logits for this rank's part of the vocabulary. rows, positions: [draws] int64.
    """
    if decoder.ranks is None:
        return sampler.draw_simple(own, rows, positions)
    found = sampler.candidates(own, rows, positions, decoder.head.first)
    return sampler.choose(decoder.ranks.gather(found, decoder.ranks.count * found.shape[1]))


def draw_in_graph(
    decoder: Decoder, sampler: Sampler, own: Tensor, rows: Tensor, positions: Tensor, kind: Kind
) -> Draws:
    """Draw in one of the kinds that graphs capture. Args as for `draw_from_shards`."""
    if kind is Kind.SIMPLE:
        return draw_from_shards(decoder, sampler, own, rows, positions)
    return sampler.draw_filtered(decoder.head.all_logits(own), rows, positions)
