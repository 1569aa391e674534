"""The same requests get the same tokens, whatever the scheduler does to them."""

from __future__ import annotations

import random

import pytest

from aengine.scheduling.sequence import Sequence
from tests.one_in import one_in
from tests.scheduling.stepping import Stepper

VARIANTS: dict[str, dict[str, int | bool]] = {
    "one row": {"max_rows": 1},
    "two rows": {"max_rows": 2},
    "eight rows": {"max_rows": 8},
    "thirty-two rows": {"max_rows": 32},
    "no lookahead": {"lookahead": 0},
    "deeper lookahead": {"lookahead": 2},
    "no prefix cache": {"prefix_cache": False},
    "pool far too small": {"num_pages": 12},
    "pool far too small, no prefix cache, no lookahead": {"num_pages": 12, "prefix_cache": False, "lookahead": 0},
    "small chunks": {"max_step_tokens": 33},
    "small chunks, small pool": {"max_step_tokens": 33, "num_pages": 16},
    "one token a page": {"page_size": 1, "num_pages": 400},
    "large pages": {"page_size": 64},
}


def outputs(seed: int, **knobs: int | bool) -> list[list[int]]:
    """Return the outputs of 40 requests that come in groups; half of them share a prefix."""
    pick = random.Random(seed)
    stepper = Stepper(**{"num_pages": 200, "page_size": 4, "max_rows": 32, "vocab": 8, **knobs})  # type: ignore[arg-type]
    bases = [[pick.randrange(8) for _ in range(24)] for _ in range(3)]
    sequences: list[Sequence] = []
    for arrival in range(40):
        sequences += stepper.request(
            pick.choice(bases)[: pick.randint(1, 24)] + [pick.randrange(8)] * pick.randint(0, 3),
            pick.randint(1, 16),
            n=pick.choice([1, 1, 1, 3]),
            seed=pick.randrange(5),
            stop_ids=pick.choice([(), (7,)]),
            arrival=float(arrival),
            priority=pick.randint(0, 1),
        )
        for _ in range(pick.choice([0, 0, 1, 9])):
            stepper.step()
    stepper.run()
    stepper.check_outputs()
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("seed", one_in(3, range(3)))
def test_the_same_tokens_whatever_the_batch_the_pool_the_chunks_and_the_lookahead(seed: int) -> None:
    reference = outputs(seed)
    for name, knobs in VARIANTS.items():
        assert outputs(seed, **knobs) == reference, name
