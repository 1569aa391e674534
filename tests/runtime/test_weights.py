"""A reload may use memory that steps leave to others, and only while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aengine.runtime.weights import Weights

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_layer_is_made_beside_the_one_that_is_there(gpus: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several GPUs no cached memory is freed, because their steps need it."""
    shares = dict.fromkeys(GPUS[:gpus], 0.8)
    emptied: list[bool] = []
    for name, value in {
        "get_per_process_memory_fraction": shares.__getitem__,
        "set_per_process_memory_fraction": lambda share, gpu: shares.update({gpu: share}),
        "empty_cache": lambda: emptied.append(True),
        "synchronize": lambda gpu: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    meanwhile: list[float] = []

    def copy_into(*_: object) -> None:
        meanwhile.extend(shares.values())
        if fails:
            raise torch.OutOfMemoryError

    decoders: Any = [SimpleNamespace(device=gpu, groups=[]) for gpu in shares]
    model: Any = None
    weights, checkpoint = Weights(decoders, model, progress=False), SimpleNamespace(copy_into=copy_into)
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            weights.reload(checkpoint)  # type: ignore[arg-type]
    else:
        weights.reload(checkpoint)  # type: ignore[arg-type]
    assert meanwhile == ([1.0] if gpus == 1 else [0.8, 0.8])
    assert set(shares.values()) == {0.8}
    assert emptied == [True] * (gpus == 1)
    assert weights.consistent != fails
