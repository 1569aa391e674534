"""The same requests get the same tokens, whatever the scheduler does to them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aengine.scheduling.sequence import Sequence
from tests.one_in import one_in
from tests.scheduling.stepping import Stepper

ALL, NONE, SOME = (9,), (0,), (2, 0, 1, 5, 0, 0, 3)  # drafts that are accepted in turn
VARIANTS: dict[str, dict[str, Any]] = {
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
    "one draft, always accepted": {"most_drafts": 1, "accepts": ALL},
    "drafts that are all accepted": {"most_drafts": 5, "accepts": ALL},
    "drafts that are all refused": {"most_drafts": 5, "accepts": NONE},
    "drafts": {"most_drafts": 5, "accepts": SOME},
    "drafts, no lookahead": {"most_drafts": 4, "accepts": SOME, "lookahead": 0},
    "drafts, deeper lookahead": {"most_drafts": 3, "accepts": SOME, "lookahead": 2},
    "drafts, pool far too small": {"most_drafts": 5, "accepts": SOME, "num_pages": 12},
    "drafts, pool far too small, deeper lookahead": {
        "most_drafts": 2,
        "accepts": SOME,
        "num_pages": 12,
        "lookahead": 2,
    },
    "drafts, small chunks": {"most_drafts": 5, "accepts": SOME, "max_step_tokens": 33},
    "more drafts than a page holds": {"most_drafts": 5, "accepts": SOME, "page_size": 2, "num_pages": 400},
    "drafts, one token a page": {"most_drafts": 5, "accepts": SOME, "page_size": 1, "num_pages": 400},
    "drafts, large pages": {"most_drafts": 5, "accepts": SOME, "page_size": 64},
    "drafts, no prefix cache": {"most_drafts": 5, "accepts": SOME, "prefix_cache": False},
}


def outputs(seed: int, **knobs: Any) -> list[list[int]]:
    """Return the outputs of 40 requests that come in groups; half of them share a prefix."""
    pick = random.Random(seed)
    stepper = Stepper(**{"num_pages": 200, "page_size": 4, "max_rows": 32, "vocab": 8, **knobs})
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
            speculates=pick.random() < 0.8,
        )
        for _ in range(pick.choice([0, 0, 1, 9])):
            stepper.step()
    stepper.run()
    stepper.check_outputs()
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("seed", one_in(3, range(3)))
def test_the_same_tokens_whatever_the_batch_the_pool_the_chunks_the_lookahead_and_the_drafts(seed: int) -> None:
    reference = outputs(seed)
    for name, knobs in VARIANTS.items():
        assert outputs(seed, **knobs) == reference, name
