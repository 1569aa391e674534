"""Random weights, for benchmarks and tests of a shape without its checkpoint."""

from __future__ import annotations

import torch

from aengine.model.decoder import Decoder
from aengine.model.groups import needed


def fill_random(decoder: Decoder, seed: int) -> None:
    """Fill every parameter on its own device: matrices normal with variance 1 / inputs, norms 1, biases 0.

    The same seed gives the same weights on the same kind of device.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for group in decoder.groups:
        entries = group.entries
        # Experts are quicker filled all in one.
        whole = {name for name, entry in entries.items() if entry.replaces}
        covered = {name for entry in entries.values() for name in entry.replaces}
        names = [name for name in (whole | set(needed(entries))) if name not in covered]
        places = group.open(names)
        for name in sorted(names):
            place = places[name]
            if (value := entries[name].random_value) is not None:
                place.fill_(value)
            elif place.dtype == torch.float8_e4m3fn:
                for part in place.view(-1).split(2**24):  # there is no generator of such numbers
                    part.copy_(torch.empty_like(part, dtype=torch.float32).normal_(0.0, 4.0, generator=generator))
            elif not place.is_floating_point():
                place.random_(generator=generator)
            elif "scale" in name:
                place.fill_(2.0**-8)  # together with numbers of about 4
            elif place.dim() > 1:
                place.normal_(0.0, place.shape[-1] ** -0.5, generator=generator)
            else:
                place.fill_(0.0 if name.endswith(".bias") else 1.0)
        group.close()
