"""The decoder equals transformers for every architecture, however the work is divided into steps."""

from __future__ import annotations

import pytest
import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from tests.model.loading_one import load_model

from .checkpoints import CASES, LONGROPE_CASES, Reference, reference, write_checkpoint
from .harness import Harness, Running

NEW_TOKENS = 24
ALWAYS = (
    "qwen3-5-wrapped",
    "gpt-oss",
)  # the two that differ most, in chunks with decodes. Other families and other ways to divide the work are slow tests.


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES | LONGROPE_CASES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder)
    expected = reference(model, per_length=5, least=12, new_tokens=NEW_TOKENS)
    decoder = load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )
    return decoder, expected


def assert_equal(sequences: list[Running], expected: Reference) -> None:
    for sequence, prompt, ids, logits in zip(sequences, expected.prompts, expected.ids, expected.logits, strict=True):
        assert sequence.tokens == prompt + ids
        torch.testing.assert_close(torch.stack(sequence.logits), logits, atol=1e-4, rtol=0)


def test_the_continuations_are_worth_comparing(subject: tuple[Decoder, Reference]) -> None:
    _, expected = subject
    assert len({token for ids in expected.ids for token in ids}) > 50
    assert len({tuple(ids[-4:]) for ids in expected.ids}) > len(expected.ids) // 2


def test_sixteen_at_once_with_prompts_in_chunks_beside_decodes(subject: tuple[Decoder, Reference]) -> None:
    decoder, expected = subject
    harness = Harness(decoder, page_size=3, num_pages=2000)
    assert_equal(harness.generate(expected.prompts, NEW_TOKENS, chunk=13), expected)


def alone(decoder: Decoder, expected: Reference) -> None:
    """Only the first and the last prompt of each length. In batches, all are tried."""
    lengths = [len(prompt) for prompt in expected.prompts]
    some = [i for i, length in enumerate(lengths) if lengths.index(length) == i or lengths[i + 1 : i + 2] != [length]]
    few = Reference(*([values[i] for i in some] for values in (expected.prompts, expected.ids, expected.logits)))
    assert {len(prompt) for prompt in few.prompts} == {*lengths}
    assert_equal(Harness(decoder, page_size=16).generate(few.prompts, NEW_TOKENS, batch=1), few)


def sixteen_at_once(decoder: Decoder, expected: Reference) -> None:
    assert_equal(Harness(decoder, page_size=16).generate(expected.prompts, NEW_TOKENS), expected)


def shared_prefixes(decoder: Decoder, expected: Reference) -> None:
    """Another sequence reads the pages of each prompt. tests/engine/test_hybrids.py does this for recurrent models."""
    if decoder.config.recurrent:
        alone(decoder, expected)
        return
    harness = Harness(decoder, page_size=6, num_pages=1600)
    owners = harness.generate(expected.prompts, NEW_TOKENS)
    sharers = []
    for owner, prompt in zip(owners, expected.prompts):
        shared = (len(prompt) - 1) // harness.page_size  # at least one prompt token is computed again
        sharers.append(Running(list(prompt), owner.pages[:shared], shared * harness.page_size))
    assert any(sequence.computed > 0 for sequence in sharers)
    assert_equal(harness.run(sharers, NEW_TOKENS, chunk=7), expected)


WAYS = {way.__name__: way for way in (alone, sixteen_at_once, shared_prefixes)}


@pytest.mark.slow
@pytest.mark.turns("way")
@pytest.mark.parametrize("way", WAYS)
def test_with_whole_prompts_and_shared_ones(way: str, subject: tuple[Decoder, Reference]) -> None:
    """The ways take turns: one for each family. All families have the chunks above."""
    WAYS[way](*subject)
