"""Answers to prompts with images are those of transformers, however the prompts are cut into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aengine.model.decoder import Decoder
from tests.model.ranks import Counted, InPieces, Ranks
from tests.model.towers.checkpoints import SEEING_CASES, picture, processed, write_seeing
from tests.model.towers.seeing_harness import Prompt, SeeingHarness, running
from tests.model.towers.test_towers import load

# Cases in which tokens of an image do not see later ones. The attention backends do not know the others yet.
CAUSAL = [case for case in SEEING_CASES if case not in ("gemma3", "gemma4-plain")]
NEW = 6


@pytest.fixture(scope="module", params=CAUSAL)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Decoder]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = write_seeing(request.param, folder)
    return request.param, model, load(folder)


def prompts() -> list[Prompt]:
    return [
        [[5, 9, 3, 7], picture(40, 24, 1), [8, 2], picture(24, 64, 2), [2], picture(30, 30, 3), [4, 4, 1]],
        [picture(64, 40, 4), [11, 12, 13, 14, 15]],
        [list(range(20, 60)), picture(24, 24, 5), [6]],
    ]


def answer(case: str, model: Any, tokens: list[int], prompt: Prompt, decoder: Decoder) -> list[int]:
    """Return what transformers continues a prompt with, greedily."""
    inputs = processed(case, [piece for piece in prompt if not isinstance(piece, list)])
    spec = decoder.config.images
    assert spec is not None
    names = {
        "qwen": ("pixel_values", "image_grid_thw"),
        "gemm": ("pixel_values", "image_position_ids"),
        "mist": ("pixel_values", "image_sizes"),
    }[case[:4]]
    known = list(tokens)
    for _ in range(NEW):
        ids = torch.tensor([known])
        kinds = {} if case.startswith("mistral") else {"mm_token_type_ids": (ids == spec.placeholders.token).long()}
        with torch.no_grad():
            logits = model(input_ids=ids, **{name: inputs[name] for name in names}, **kinds, use_cache=False).logits
        known.append(int(logits[0, -1].argmax()))
    return known[len(tokens) :]


def test_answers_to_prompts_with_images(seeing: tuple[str, Any, Decoder]) -> None:
    case, model, decoder = seeing
    asked = [running(decoder, prompt).tokens for prompt in prompts()]
    expected = [answer(case, model, tokens, prompt, decoder) for tokens, prompt in zip(asked, prompts())]
    for chunk in (None, 7):  # chunks end at any place of an image
        sequences = [running(decoder, prompt) for prompt in prompts()]
        SeeingHarness(decoder, page_size=8).run(list(sequences), NEW, chunk=chunk)
        assert [one.tokens[len(tokens) :] for one, tokens in zip(sequences, asked)] == expected


@pytest.mark.parametrize("collective", [Counted, InPieces])
def test_each_rank_has_the_whole_tower(tmp_path: Path, collective: type[Counted]) -> None:
    write_seeing("qwen3-vl", tmp_path)
    alone = load(tmp_path)
    expected = [running(alone, prompt) for prompt in prompts()]
    SeeingHarness(alone, page_size=8).run(list(expected), NEW)
    ranks = Ranks(tmp_path, 2, collective=collective, sees=True)

    def answers(decoder: Decoder) -> list[list[int]]:
        sequences = [running(decoder, prompt) for prompt in prompts()]
        SeeingHarness(decoder, page_size=8).run(list(sequences), NEW)
        return [one.tokens for one in sequences]

    assert ranks.each(answers) == [[one.tokens for one in expected]] * 2
