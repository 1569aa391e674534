"""Embeddings of images are those that transformers computes from the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from tests.model.loading_one import load_model
from tests.model.towers.checkpoints import SEEING_CASES, SIZES, picture, processed, write_seeing
from tests.model.towers.seeing_harness import embed


@pytest.fixture(scope="module", params=sorted(SEEING_CASES))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Decoder]:
    """A case, transformers' model, and ours with its tower."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_seeing(request.param, folder)
    return request.param, model, load(folder)


def load(folder: Path) -> Decoder:
    return load_model(
        folder,
        ModelConfig.from_folder(folder).with_images(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )


@pytest.mark.parametrize("size", SIZES)
def test_one_image(seeing: tuple[str, Any, Decoder], size: tuple[int, int]) -> None:
    case, model, decoder = seeing
    images = [picture(*size)]
    with torch.no_grad():
        expected, deep = SEEING_CASES[case].features(model, processed(case, images))
    found = embed(decoder, images)
    torch.testing.assert_close(found.tokens, expected, rtol=1e-4, atol=1e-4)
    assert len(found.deep) == len(deep)
    for ours, theirs in zip(found.deep, deep):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_several_images_do_not_see_each_other(seeing: tuple[str, Any, Decoder]) -> None:
    case, model, decoder = seeing
    images = [picture(*size, seed=i) for i, size in enumerate((SIZES[0], SIZES[0], SIZES[1], SIZES[3], SIZES[1]))]
    with torch.no_grad():
        expected, _ = SEEING_CASES[case].features(model, processed(case, images))
    found = embed(decoder, images)
    torch.testing.assert_close(found.tokens, expected, rtol=1e-4, atol=1e-4)
    alone = torch.cat([embed(decoder, [image]).tokens for image in images])
    torch.testing.assert_close(found.tokens, alone, rtol=1e-4, atol=1e-4)
