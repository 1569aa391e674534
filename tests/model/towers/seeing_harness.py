"""A harness whose prompts have images between texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from aengine.model.blocks.step import ImageRows
from aengine.model.decoder import Decoder
from aengine.model.images.positions import grid_positions
from aengine.model.images.resizing import ImagePlan
from aengine.model.towers.base import ImageEmbeddings
from aengine.model.towers.patches import batch_images
from tests.model.harness import Harness, Running
from tests.model.towers.checkpoints import resized

Prompt = Sequence[list[int] | Image.Image]


def embed(decoder: Decoder, images: Sequence[Image.Image], dtype: torch.dtype = torch.float32) -> ImageEmbeddings:
    """Compute the embeddings of images that are not resized yet."""
    spec, tower = decoder.config.images, decoder.tower
    assert spec is not None
    assert tower is not None
    plans = [spec.plan(*image.size) for image in images]
    pixels = [torch.tensor(resized(one, plan.width, plan.height, spec.resample)) for one, plan in zip(images, plans)]
    with torch.inference_mode():
        return tower(batch_images(list(zip(pixels, plans)), spec, dtype))


@dataclass
class RunningImages(Running):
    """A sequence whose prompt has images."""

    images: ImageEmbeddings | None = None
    indices: tuple[int, ...] = ()  # of the tokens that have an embedding
    grid: Tensor | None = None  # [3, tokens of the prompt]
    shift: int = 0  # of the positions after the prompt


def running(decoder: Decoder, prompt: Prompt) -> RunningImages:
    """Return a sequence that is not computed yet. prompt: ids of texts, and images."""
    spec = decoder.config.images
    assert spec is not None
    marks, tokens, pieces, images = spec.placeholders, [], [], []
    for piece in prompt:
        if isinstance(piece, list):
            tokens += piece
            pieces.append(len(piece))
        else:
            plan: ImagePlan = spec.plan(*piece.size)
            ends = (118, 119) if marks.row_end else (None, None)
            tokens += marks.ids(plan, *ends)
            pieces.append(plan)
            images.append(piece)
    indices = tuple(i for i, token in enumerate(tokens) if token == marks.token)
    found = RunningImages(tokens, images=embed(decoder, images), indices=indices)
    if spec.grid_rope is not None:
        positions, found.shift = grid_positions(pieces)
        found.grid = torch.tensor(positions)
    return found


class SeeingHarness(Harness):
    """Steps with tokens of images."""

    def seen(self, spans: Sequence[tuple[Running, range]], positions: Tensor) -> tuple[Tensor, ImageRows | None]:
        at: list[int] = []
        rows: list[tuple[ImageEmbeddings, int]] = []
        turned: list[Tensor] = []
        first = 0
        for sequence, span in spans:
            assert isinstance(sequence, RunningImages)
            assert sequence.images is not None
            for number, index in enumerate(sequence.indices):
                if index in span:
                    at.append(first + index - span.start)
                    rows.append((sequence.images, number))
            if sequence.grid is not None:
                known = sequence.grid[:, span.start : span.stop]
                later = torch.arange(span.start + known.shape[1], span.stop) + sequence.shift
                turned.append(torch.cat((known, later.expand(3, -1)), dim=1))
            first += len(span)
        if turned:
            whole = torch.cat(turned, dim=1)  # without tokens of images, one position is enough
            positions = whole if at or not torch.equal(whole[0], whole[1]) else whole[0]
        if not at:
            return positions, None
        tokens = torch.stack([images.tokens[number] for images, number in rows])
        layers = range(len(rows[0][0].deep))
        deep = tuple(torch.stack([images.deep[layer][number] for images, number in rows]) for layer in layers)
        return positions, ImageRows(torch.tensor(at), tokens, deep)
