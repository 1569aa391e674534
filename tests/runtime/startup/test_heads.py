"""Heads that no kernel takes are refused before weights are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.model.spec.attention import AttentionSpec
from aengine.runtime.startup.start_cuda import _check_heads


def model(dim: int) -> Any:
    attention = ModelConfig.from_folder(resolve_model(None, None)).attending[0]
    assert isinstance(attention, AttentionSpec)
    return SimpleNamespace(attending=[attention, msgspec.structs.replace(attention, head_dim=dim)])


@pytest.mark.parametrize("dim", [16, 80, 96, 100, 128, 512])
def test_even_numbers_of_elements_are_taken(dim: int) -> None:
    _check_heads(model(dim))


@pytest.mark.parametrize("dim", [8, 33, 576])
def test_others_are_refused_by_name(dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"heads have {dim} elements.*device='cpu'"):
        _check_heads(model(dim))
