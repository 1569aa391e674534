"""Every tensor of a checkpoint is matched with a parameter before any is read."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import CheckpointError, WeightsError
from aengine.kernels.linear.torch_linear import TorchLinear
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint import weights
from aengine.model.checkpoint.safetensors import INDEX, SINGLE
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import Group
from tests.model.checkpoints import write_checkpoint
from tests.model.loading_one import load_model

Change = Callable[[dict[str, Tensor]], None]


class Kept:
    """A group that keeps its tensors for the test."""

    def __init__(self, group: Group, places: dict[str, Tensor]) -> None:
        self.entries = group.entries
        self._group = group
        self._places = places

    def open(self, present: Collection[str]) -> Mapping[str, Tensor]:
        places = self._group.open(present)
        self._places.update(places)
        return places

    def close(self) -> None:
        self._group.close()


def build(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the contents of each parameter."""
    config = ModelConfig.from_folder(folder)
    decoder = Decoder(config, TorchKernels(), TorchAttention(), dtype, torch.device("cpu"))
    places: dict[str, Tensor] = {}
    checkpoint = Checkpoint(folder, decoder.groups, config.tie_word_embeddings)
    checkpoint.copy_into([[Kept(group, places) for group in decoder.groups]], progress=False)
    return places


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for case in ("qwen3", "llama-all-biases"):
        folders[case] = tmp_path_factory.mktemp(case)
        write_checkpoint(case, folders[case])
    return folders


@pytest.fixture
def tied(written: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint with tied embeddings, for tests to damage."""
    return Path(shutil.copytree(written["qwen3"], tmp_path / "tied"))


@pytest.fixture
def untied(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["llama-all-biases"], tmp_path / "untied"))


def rewrite(folder: Path, change: Change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Split the weights of a folder into files, write their index, and return its map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    weight_map = {name: files[i % parts] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_every_tensor_lands_in_its_place(untied: Path) -> None:
    loaded = build(untied)
    expected = load_file(untied / SINGLE)
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_fused_parameters_are_parts_of_one_tensor(untied: Path) -> None:
    views = build(untied)
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for kind in ("weight", "bias"):
            storages = {views[f"model.layers.1.{part}.{kind}"].untyped_storage().data_ptr() for part in parts}
            assert len(storages) == 1


def test_shards_load_as_one_file_does(untied: Path) -> None:
    whole = build(untied)
    shard(untied)
    sharded = build(untied)
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_are_converted(untied: Path, stored: torch.dtype) -> None:
    rewrite(untied, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    for name, tensor in load_file(untied / SINGLE).items():
        assert torch.equal(build(untied, torch.bfloat16)[name], tensor.to(torch.bfloat16))
        break


def test_names_without_the_model_prefix(tied: Path) -> None:
    expected = build(tied)

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(tied, strip)
    assert all(torch.equal(view, expected[name]) for name, view in build(tied).items())


def test_derived_buffers_are_ignored(tied: Path) -> None:
    def extend(tensors: dict[str, Tensor]) -> None:
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(3)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    rewrite(tied, extend)
    build(tied)


class TestTiedHead:
    def add_head(self, folder: Path, change: Callable[[Tensor], Tensor]) -> None:
        rewrite(folder, lambda t: t.update({"lm_head.weight": change(t["model.embed_tokens.weight"]).clone()}))

    def test_a_copy_of_the_embedding_is_ignored(self, tied: Path) -> None:
        self.add_head(tied, lambda embedding: embedding)
        build(tied)

    def test_another_matrix_is_refused(self, tied: Path) -> None:
        self.add_head(tied, lambda embedding: embedding + 1)
        with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            build(tied)

    def test_another_shape_is_refused(self, tied: Path) -> None:
        self.add_head(tied, lambda embedding: embedding[1:])
        with pytest.raises(WeightsError, match=r"lm_head\.weight has shape"):
            build(tied)

    def test_an_untied_model_needs_its_own(self, untied: Path) -> None:
        rewrite(untied, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(WeightsError, match=r"lack lm_head\.weight"):
            build(untied)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop(NAME), rf"the weights lack {NAME}$"),
        (lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name], r"lack model\.layers\.1\.\S+, .* more$"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[NAME].clone()}), r"hold model\.layers\.2\.mlp"),
        (lambda t: t.update({"visual.proj": torch.zeros(1)}), r"hold visual\.proj, which this model does not have"),
        (lambda t: t.update({"visual.proj": t.pop(NAME)}), rf"lack {NAME}; they hold visual\.proj, which this"),
        (lambda t: t.update({NAME: t[NAME].T.contiguous()}), rf"{NAME} has shape \[64, 96\], config.json makes it"),
        (lambda t: t.update({NAME: t[NAME][:-1].clone()}), rf"{NAME} has shape \[95, 64\]"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int8)}), rf"{NAME} is I8; only F16, BF16"),
        (lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)}), rf"{NAME} is F8_E4M3; only"),
        (lambda t: t.update({NAME.removeprefix("model."): t[NAME].clone()}), r"mlp\.up_proj\.weight is also in"),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_tensor(untied: Path, change: Change, why: str) -> None:
    rewrite(untied, change)
    with pytest.raises(WeightsError, match=why):
        build(untied)


class TestIndex:
    def test_a_tensor_in_two_shards(self, untied: Path) -> None:
        weight_map = shard(untied)
        other = next(file for file in weight_map.values() if file != weight_map[NAME])
        tensors = load_file(untied / other)
        tensors[NAME] = load_file(untied / weight_map[NAME])[NAME]
        save_file(tensors, untied / other)
        with pytest.raises(WeightsError, match=f"{NAME} is also in"):
            build(untied)

    def test_a_shard_that_is_not_there(self, untied: Path) -> None:
        weight_map = shard(untied)
        (untied / weight_map[NAME]).unlink()
        with pytest.raises(WeightsError, match=rf"{weight_map[NAME]}: no such file; the checkpoint is incomplete"):
            build(untied)

    @pytest.mark.parametrize(
        "name",
        [
            "../secret.safetensors",
            "/etc/secret.safetensors",
            "folder/model.safetensors",
            "..\\secret.safetensors",
            "c:secret.safetensors",
            ".safetensors",
            "model.safetensors\0",
            "model.bin",
            "",
            7,
            None,
        ],
    )
    def test_files_outside_the_folder_are_never_opened(self, untied: Path, name: object) -> None:
        weight_map: dict[str, object] = dict(shard(untied))
        save_file({NAME: torch.zeros(96, 64)}, untied.parent / "secret.safetensors")
        weight_map[NAME] = name
        write_index(untied, weight_map)
        with pytest.raises(WeightsError, match="no plain file name"):
            build(untied)

    @pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
    def test_an_index_without_a_map(self, untied: Path, weight_map: object) -> None:
        shard(untied)
        write_index(untied, weight_map)
        with pytest.raises(WeightsError, match="weight_map"):
            build(untied)

    def test_an_index_that_is_no_json(self, untied: Path) -> None:
        shard(untied)
        (untied / INDEX).write_text("{")
        with pytest.raises(CheckpointError, match="not valid JSON"):
            build(untied)

    def test_a_truncated_shard(self, untied: Path) -> None:
        path = untied / shard(untied)[NAME]
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(WeightsError, match="truncated"):
            build(untied)


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("exploded"),))


def test_pickles_are_named_and_never_loaded(untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (untied / SINGLE).unlink()
    (untied / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is a pickle"):
        build(untied)
    assert not (tmp_path / "exploded").exists()


def test_no_weights_at_all(untied: Path) -> None:
    (untied / SINGLE).unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        build(untied)


def test_links_are_followed_as_the_hub_cache_needs(untied: Path, tmp_path: Path) -> None:
    (untied / SINGLE).rename(tmp_path / "blob")
    (untied / SINGLE).symlink_to("../blob")
    build(untied)


def load(folder: Path, **changes: object) -> Decoder:
    settings: dict[str, object] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "kernels": TorchKernels(),
        "attention": TorchAttention(),
    }
    return load_model(folder, ModelConfig.from_folder(folder), **{**settings, **changes})  # type: ignore[arg-type]


class TestDummy:
    def weights(self, folder: Path, seed: int) -> list[Tensor]:
        kept: list[Tensor] = []

        class Keep(TorchKernels):
            def dense(self, weight: Tensor, bias: Tensor | None) -> TorchLinear:
                kept.append(weight)
                return super().dense(weight, bias)

        load(folder, kernels=Keep(), load_format="dummy", seed=seed)
        return kept

    def test_needs_config_json_alone(self, untied: Path) -> None:
        (untied / SINGLE).unlink()
        matrices = self.weights(untied, seed=1)
        assert all(weight.isfinite().all() and weight.std() > 0 for weight in matrices)

    def test_the_seed_decides(self, untied: Path) -> None:
        first, again, other = (self.weights(untied, seed) for seed in (1, 1, 2))
        assert all(map(torch.equal, first, again))
        assert not any(map(torch.equal, first, other))


def test_parameters_are_counted_once_when_tied(tied: Path, untied: Path) -> None:
    for folder in (tied, untied):
        assert ModelConfig.from_folder(folder).parameters == sum(
            tensor.numel() for tensor in load_file(folder / SINGLE).values()
        )


@pytest.mark.parametrize(("progress", "disable"), [(True, None), (False, True)])
def test_the_progress_bar_counts_bytes_and_needs_a_terminal(
    untied: Path, progress: bool, disable: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = []

    class Bar(weights.tqdm):  # type: ignore[misc, name-defined]
        def __init__(self, **options: object) -> None:
            assert options["disable"] is disable  # None: disabled unless stderr is a terminal
            super().__init__(**{**options, "disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr(weights, "tqdm", Bar)
    load(untied, progress=progress)
    (bar,) = bars
    assert bar.n == bar.total == sum(tensor.nbytes for tensor in load_file(untied / SINGLE).values())


def test_a_file_that_changes_while_loading(untied: Path) -> None:
    config = ModelConfig.from_folder(untied)
    decoder = Decoder(config, TorchKernels(), TorchAttention(), torch.float32, torch.device("cpu"))
    checkpoint = Checkpoint(untied, decoder.groups, tied=False)
    (untied / SINGLE).write_bytes((untied / SINGLE).read_bytes()[:1000])
    with pytest.raises(WeightsError, match=r"model\.safetensors: "):
        checkpoint.copy_into([decoder.groups], progress=False)
