"""Random weights, for benchmarks and tests of a shape without its checkpoint."""

from __future__ import annotations

import torch

from aengine.model.decoder import Decoder


def fill_random(decoder: Decoder, seed: int) -> None:
    """Fill every parameter on its own device: matrices normal with variance 1 / inputs, norms 1, biases 0.

    The same seed gives the same weights on the same kind of device.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for group in decoder.groups:
        covered = {name for entry in group.entries.values() for name in entry.instead_of}
        for name, place in group.open().items():
            if name in covered:
                continue
            if place.dim() > 1:
                place.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
            else:
                place.fill_(0.0 if name.endswith(".bias") else 1.0)
        group.close()
