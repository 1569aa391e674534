"""PEFT's default for an adapted output matrix: the file also holds a copy of the base's matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aengine.errors import AdapterError
from aengine.model.config import ModelConfig
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.read import read_adapter
from tests.one_in import one_in

from ..checkpoints import write_checkpoint
from .adapters import room_for, write_adapter

FILE, COPY = "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"


class Written:
    """A base, an adapter of its output matrix with a copy of the matrix, and the same without the copy."""

    def __init__(self, case: str, folder: Path) -> None:
        self.base, self.adapter, self.without = folder / "base", folder / "adapter", folder / "without"
        model = write_checkpoint(case, self.base)
        settings = {"target_modules": ["lm_head", "q_proj"]}
        write_adapter(model, self.adapter, save_embedding_layers="auto", **settings)
        write_adapter(model, self.without, **settings)
        config = ModelConfig.from_folder(self.base)
        self.linears, self.room = adaptable_linears(config), room_for(config, [self.without])

    def read(self, folder: Path, base: Path | None) -> dict[str, torch.Tensor]:
        adapter = read_adapter(folder, self.linears, self.room, torch.float32, base)
        return {name: factors.b for name, factors in adapter.linears.items()}

    def change(self, copy: torch.Tensor) -> None:
        save_file(load_file(self.adapter / FILE) | {COPY: copy}, self.adapter / FILE)


@pytest.fixture(params=one_in(2, ["qwen3", "qwen3-bias-untied", "qwen3-5-wrapped-tied", "qwen3-5-wrapped"]))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    made = Written(request.param, tmp_path)
    assert COPY in load_file(made.adapter / FILE)
    return made


def test_a_copy_of_the_bases_own_changes_nothing(written: Written) -> None:
    expected = written.read(written.without, None)
    taken = written.read(written.adapter, written.base)
    assert taken.keys() == expected.keys()
    assert all(torch.equal(taken[name], expected[name]) for name in taken)
    assert room_for(ModelConfig.from_folder(written.base), [written.adapter]) == written.room


@pytest.mark.slow
def test_a_copy_of_a_coarser_type_is_one_too(written: Written) -> None:
    written.change(load_file(written.adapter / FILE)[COPY].bfloat16())
    written.read(written.adapter, written.base)


def test_older_versions_have_it_in_the_language_model(tmp_path: Path) -> None:
    written = Written("qwen3-5-wrapped", tmp_path)
    tensors = load_file(written.adapter / FILE)
    older = {name.replace(".model.lm_head.", ".model.language_model.lm_head."): one for name, one in tensors.items()}
    assert older.keys() != tensors.keys()
    save_file(older, written.adapter / FILE)
    taken, expected = written.read(written.adapter, written.base), written.read(written.without, None)
    assert all(torch.equal(taken[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_another_matrix_is_refused_by_name(written: Written) -> None:
    copy = load_file(written.adapter / FILE)[COPY]
    other = copy.clone()
    other[-1, -1] += 0.5
    for changed, message in (
        (other, "is not the base's own output matrix"),
        (copy[:-1].contiguous(), "belongs to another base model"),
        (copy.to(torch.int32), "belongs to another base model"),
    ):
        written.change(changed)
        with pytest.raises(AdapterError, match=rf"lm_head\.base_layer\.weight .*{message}"):
            written.read(written.adapter, written.base)


def test_it_is_refused_where_there_is_nothing_to_compare_it_with(written: Written) -> None:
    with pytest.raises(AdapterError, match="has random weights; save the adapter with save_embedding_layers=False"):
        written.read(written.adapter, None)


def test_a_copy_without_factors_is_refused(written: Written) -> None:
    tensors = load_file(written.adapter / FILE)
    save_file({name: one for name, one in tensors.items() if "lm_head.lora" not in name}, written.adapter / FILE)
    with pytest.raises(AdapterError, match="exists without factors of lm_head"):
        written.read(written.adapter, written.base)
