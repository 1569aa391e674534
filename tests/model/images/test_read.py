"""What the files of a checkpoint say about images, and what leaves a model with text alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aengine.model.images.read import read_image_spec
from aengine.model.images.resizing import AreaRule, ImagePlan
from aengine.model.images.spec import GridRope, Placeholders
from tests.model.images.specs import image_spec, read_files, write_files
from tests.model.towers.checkpoints import change_json


def test_a_processor_in_processor_config_is_preferred(tmp_path: Path) -> None:
    write_files("qwen3-5", tmp_path)
    inner = json.loads((tmp_path / "preprocessor_config.json").read_text())
    inner["size"] = {"shortest_edge": 64, "longest_edge": 640}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    spec = read_files("qwen3-5", tmp_path)
    assert not isinstance(spec, str)
    assert spec.rule == AreaRule(8, 64, 640)


def test_limits_of_older_files(tmp_path: Path) -> None:
    write_files("qwen3-5", tmp_path)
    change_json(tmp_path / "preprocessor_config.json", size=None, min_pixels=100, max_pixels=5000)
    spec = read_files("qwen3-5", tmp_path)
    assert not isinstance(spec, str)
    assert spec.rule == AreaRule(8, 100, 5000)


@pytest.mark.parametrize(
    ("case", "mutual", "splittable"),
    [
        ("qwen3-5", "none", True),
        ("mistral3", "none", True),
        ("gemma3", "all", False),
        ("gemma4", "none", True),
        ("gemma4-plain", "sliding", False),
    ],
)
def test_whether_tokens_of_an_image_see_later_ones(case: str, mutual: str, splittable: bool, tmp_path: Path) -> None:
    spec = image_spec(case, tmp_path)
    assert (spec.mutual, spec.splittable) == (mutual, splittable)


def test_only_qwen_has_three_positions(tmp_path: Path) -> None:
    assert image_spec("qwen3-5", tmp_path / "qwen").grid_rope == GridRope((3, 3, 2), interleaved=True)
    assert image_spec("mistral3", tmp_path / "mistral").grid_rope is None


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [("qwen3-5", (), ()), ("gemma3", ("\n\n", 121), (122, "\n\n")), ("gemma4", (121,), (122,)), ("mistral3", (), ())],
)
def test_what_stands_around_an_image(
    case: str, before: tuple[object, ...], after: tuple[object, ...], tmp_path: Path
) -> None:
    found = image_spec(case, tmp_path).placeholders
    assert (found.token, found.before, found.after) == (120, before, after)
    assert found.marker == (121 if case == "gemma3" else 120)


def test_tokens_of_an_image() -> None:
    plan = ImagePlan(0, 0, rows=2, columns=3)
    assert Placeholders(marker=9, token=7).ids(plan) == [7] * 6
    rows = Placeholders(marker=7, token=7, row_end="[IMG_BREAK]", last="[IMG_END]")
    assert rows.ids(plan, row_end=8, last=9) == [7, 7, 7, 8, 7, 7, 7, 9]


def test_without_the_files_of_a_processor_the_model_serves_text(tmp_path: Path) -> None:
    write_files("gemma3", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert "neither preprocessor_config.json" in str(read_files("gemma3", tmp_path))


@pytest.mark.parametrize(
    ("case", "file", "changes", "why"),
    [
        ("qwen3-5", "preprocessor_config.json", {"patch_size": 7}, "patch_size is 7, the tower's is 4"),
        ("qwen3-5", "preprocessor_config.json", {"do_resize": False}, "do_resize is false"),
        ("qwen3-5", "preprocessor_config.json", {"image_mean": [0.5]}, "image_mean must be a list of 3 numbers"),
        ("qwen3-5", "config.json", {"vision_config": None}, "has no vision_config"),
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "crops of images are not supported"),
        ("gemma3", "config.json", {"mm_tokens_per_image": 9}, "does not divide into 3 x 3 tokens"),
        ("gemma4", "preprocessor_config.json", {"max_soft_tokens": 71}, "must be one of"),
        ("mistral3", "config.json", {"vision_feature_layer": -2}, "other than -1"),
    ],
)
def test_settings_that_the_tower_does_not_have_leave_text(
    case: str, file: str, changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    write_files(case, tmp_path)
    change_json(tmp_path / file, **changes)
    found = read_files(case, tmp_path)
    assert isinstance(found, str)
    assert why in found


def test_a_tower_with_another_activation_leaves_text(tmp_path: Path) -> None:
    write_files("mistral3", tmp_path)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    change_json(tmp_path / "config.json", vision_config=vision | {"hidden_act": "relu"})
    assert "hidden_act relu is not supported" in str(read_files("mistral3", tmp_path))


def test_any_reader_gives_a_reason_instead_of_an_error(tmp_path: Path) -> None:
    assert "no vision_config" in str(read_image_spec(tmp_path, {}, lambda files: pytest.fail("read nothing")))
