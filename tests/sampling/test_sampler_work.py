"""Work that the sampler avoids."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Sampler
from tests.sampling.build import CPU, draw, new_row
from tests.sampling.kinds import KINDS, VOCAB


class Operations(TorchDispatchMode):
    """Record the names of operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(*options: SamplingParams, steps: int = 1) -> set[str]:
    sampler = Sampler(len(options), VOCAB, CPU)
    sampler.set_rows([new_row(row, option, stop_ids=(1,)) for row, option in enumerate(options)])
    rows = list(range(len(options)))
    for step in range(steps):
        with Operations() as record:
            draw(sampler, torch.randn(len(options), VOCAB), rows, [1 + step] * len(options))
    return record.names


def test_nothing_is_read_back_from_the_device() -> None:
    everything = SamplingParams(
        temperature=1,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        logit_bias={1: 1.0},
        min_tokens=2,
        logprobs=4,
    )
    names = operations(everything, *KINDS)
    assert not names & {"_local_scalar_dense", "nonzero", "item", "masked_select", "is_nonzero", "equal", "unique"}


def test_greedy_rows_cost_only_an_argmax_and_the_check() -> None:
    names = operations(SamplingParams(temperature=0), SamplingParams(temperature=0))
    assert {"argmax", "amax"} <= names
    assert not names & {"log_", "masked_fill", "index_select", "cumsum", "index_add_", "_log_softmax"}


def test_rows_with_temperature_alone_filter_nothing() -> None:
    names = operations(SamplingParams(temperature=1))
    assert "log_" in names
    assert not names & {"cumsum", "searchsorted", "masked_fill", "index_add_", "_log_softmax"}


def test_min_p_needs_no_running_sum() -> None:
    names = operations(SamplingParams(temperature=1, min_p=0.1))
    assert "masked_fill" in names
    assert not names & {"cumsum", "searchsorted"}
