"""Tokenizers that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import (
    BACKENDS,
    byte_fallback_backend,
    byte_level_backend,
    no_decoder_backend,
    write_tokenizer,
)

DEMO = Path(__file__).parents[2] / "aengine" / "demo" / "model"


@pytest.fixture(scope="session", params=list(BACKENDS))
def any_oracle(request: pytest.FixtureRequest) -> Backend:
    """One tokenizer of each family, as the library's object."""
    return BACKENDS[request.param]()


@pytest.fixture(scope="session")
def any_tokenizer(any_oracle: Backend, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One tokenizer of each family, as ours."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("family"), any_oracle))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory, byte_level_oracle: Backend) -> Tokenizer:
    """A byte-level tokenizer with ChatML's special tokens."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("byte_level"), byte_level_oracle))


@pytest.fixture(scope="session")
def byte_level_oracle() -> Backend:
    """The byte-level tokenizer as the library's object."""
    return byte_level_backend()


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory, byte_fallback_oracle: Backend) -> Tokenizer:
    """Llama 2's shape."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("byte_fallback"), byte_fallback_oracle))


@pytest.fixture(scope="session")
def byte_fallback_oracle() -> Backend:
    """The byte-fallback tokenizer as the library's object."""
    return byte_fallback_backend()


@pytest.fixture(scope="session")
def no_decoder(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that joins tokens with spaces; none of the known decoders."""
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("no_decoder"), no_decoder_backend()))


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The checkpoint in the package."""
    if not (DEMO / "tokenizer.json").is_file():
        pytest.skip("the demo model is not built yet")
    return DEMO


@pytest.fixture(scope="session")
def demo(demo_folder: Path) -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer.load(demo_folder)


@pytest.fixture(scope="session")
def demo_oracle(demo_folder: Path) -> Backend:
    """The demo model's tokenizer as the library's object."""
    return Backend.from_file(str(demo_folder / "tokenizer.json"))
