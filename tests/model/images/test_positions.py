"""Positions of prompts with images, and the rotation by them, are those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen3_5TextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model, Qwen3_5TextRotaryEmbedding

from aengine.model.images.positions import grid_positions
from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import GridRope
from aengine.model.rope import RopeConfig, rope_table, rotate_by_axes

PROMPTS: list[list[int | tuple[int, int]]] = [
    [7],
    [(3, 5)],
    [4, (3, 5), 6],
    [1, (1, 9), 1, (9, 1), 2, (4, 4)],
    [5, (2, 2), 1, (6, 3), 30],
]


def oracle(prompt: list[int | tuple[int, int]]) -> tuple[torch.Tensor, int]:
    """Compute positions as transformers' model does, with a merge of 2. Images are rows and columns of tokens."""
    kinds: list[int] = []
    grids = []
    for piece in prompt:
        if isinstance(piece, int):
            kinds += [0] * piece
        else:
            kinds += [1] * (piece[0] * piece[1])
            grids.append([1, 2 * piece[0], 2 * piece[1]])
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **more: Qwen3_5Model.get_vision_position_ids(model, *args, **more)
    ids = torch.zeros(1, len(kinds), dtype=torch.int64)
    positions, delta = Qwen3_5Model.get_rope_index(model, ids, torch.tensor([kinds]), torch.tensor(grids or [[0] * 3]))
    return positions[:, 0], int(delta)


def ours(prompt: list[int | tuple[int, int]]) -> tuple[torch.Tensor, int]:
    plans = [piece if isinstance(piece, int) else ImagePlan(0, 0, *piece) for piece in prompt]
    positions, shift = grid_positions(plans)
    return torch.tensor(positions), shift


@pytest.mark.parametrize("prompt", PROMPTS)
def test_three_positions_of_each_token_and_the_shift_after_them(prompt: list[int | tuple[int, int]]) -> None:
    (positions, shift), (expected, delta) = ours(prompt), oracle(prompt)
    assert torch.equal(positions, expected)
    assert shift == delta


@pytest.mark.parametrize("prompt", PROMPTS)
def test_positions_of_a_part_of_a_prompt(prompt: list[int | tuple[int, int]]) -> None:
    pieces = [piece if isinstance(piece, int) else ImagePlan(0, 0, *piece) for piece in prompt]
    whole, shift = grid_positions(pieces)
    end = whole.shape[1]
    for first in range(end):
        for last in (first, first + 1, first + 7, end, end + 5):
            part, same = grid_positions(pieces, first, last)
            assert (part.tolist(), same) == (whole[:, first:last].tolist(), shift)


def test_an_empty_prompt_has_no_positions() -> None:
    positions, shift = grid_positions([])
    assert (positions.shape, shift) == ((3, 0), 0)


@pytest.mark.parametrize("sections", [(11, 11, 10), (24, 20, 20), (5, 3, 2)])
def test_alternating_frequencies(sections: tuple[int, int, int]) -> None:
    rotated = 2 * sum(sections)
    config = Qwen3_5TextConfig(
        head_dim=rotated,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": list(sections),
        },
    )
    positions, _ = ours(PROMPTS[3])
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(1).clone())
    found = _rotation(GridRope(sections, interleaved=True), rotated, positions)
    torch.testing.assert_close(found, torch.cat((cos[0, :, : rotated // 2], sin[0, :, : rotated // 2]), dim=1))


def test_frequencies_in_three_runs() -> None:
    sections, rotated = (6, 5, 5), 32
    parameters = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(sections)}
    text = Qwen2_5_VLConfig(
        text_config={"hidden_size": 64, "num_attention_heads": 2, "rope_parameters": parameters}
    ).text_config
    positions, _ = ours(PROMPTS[3])
    cos, _ = Qwen2_5_VLRotaryEmbedding(text)(torch.zeros(1), positions.unsqueeze(1).clone())
    if cos.dim() == 4:  # [3, batch, tokens, dim]: the sections are chosen when queries are rotated
        cos = torch.cat([part[i % 3] for i, part in enumerate(cos.split([*sections, *sections], dim=-1))], dim=-1)
    found = _rotation(GridRope(sections, interleaved=False), rotated, positions)
    torch.testing.assert_close(found[:, : rotated // 2], cos.reshape(len(found), -1)[:, : rotated // 2])


def test_equal_positions_rotate_like_text() -> None:
    rotated = 64
    positions = torch.arange(50).expand(3, 50)
    found = _rotation(GridRope((11, 11, 10), interleaved=True), rotated, positions)
    assert torch.equal(found, rope_table(RopeConfig(theta=5000.0), rotated, 50, torch.device("cpu")))


def _rotation(rope: GridRope, rotated: int, positions: torch.Tensor) -> torch.Tensor:
    table = rope_table(RopeConfig(theta=5000.0), rotated, 64, torch.device("cpu"))
    return rotate_by_axes(table, positions, torch.tensor(rope.axes(rotated // 2)))
