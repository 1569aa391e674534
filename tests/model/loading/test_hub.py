"""A model's name becomes a folder. The hub's cache is written by hand; there is no network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import AdapterError, HubError, UnsupportedModelError, WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import DEMO, resolve_adapter, resolve_model
from tests.model.checkpoints import write_checkpoint
from tests.model.loading_one import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def load(folder: Path) -> None:
    load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def snapshot(cache: Path, tmp_path: Path) -> Path:
    """Write a cached repository as the hub's client does: blobs, and a snapshot of links to them."""
    repository = cache / "models--some--model"
    folder = repository / "snapshots" / COMMIT
    for part in (folder, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    write_checkpoint("qwen3", tmp_path / "written")
    for number, file in enumerate((tmp_path / "written").iterdir()):
        file.rename(repository / "blobs" / str(number))
        (folder / file.name).symlink_to(Path("../../blobs") / str(number))
    return folder


def test_none_is_the_embedded_model() -> None:
    assert resolve_model(None, None) == DEMO
    assert DEMO.parts[-3:] == ("aengine", "demo", "model")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("~/models") == tmp_path / "models"


def test_a_folder_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert resolve_model("some/model") == Path("some/model")


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_id_resolves_offline_and_loads(snapshot: Path, revision: str | None) -> None:
    folder = resolve_model("some/model", revision)
    assert folder == snapshot
    load(folder)


@pytest.mark.parametrize(("model", "revision"), [("other/model", None), ("some/model", "v2"), ("model", None)])
def test_what_is_not_cached_says_what_where_and_what_to_do(
    snapshot: Path, cache: Path, model: str, revision: str | None
) -> None:
    with pytest.raises(HubError) as error:
        resolve_model(model, revision)
    message = str(error.value)
    for part in (
        f"{model} (revision {revision or 'main'})",
        str(cache),
        "unset HF_HUB_OFFLINE",
        f"hf download {model}",
    ):
        assert part in message


def test_a_download_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(HubError, match=r"downloading it failed: ConnectionError: no route to host.*HF_TOKEN"):
        resolve_model("some/model")


def test_only_what_loading_reads_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    others = ["pytorch_model.bin", "modeling.py", "README.md", "consolidated.safetensors", "onnx/model.safetensors"]
    asked: list[str] = []

    def download(repo: str, **patterns: object) -> str:
        patterns.pop("revision")
        asked.extend(filter_repo_objects(files + others, **patterns))  # type: ignore[arg-type]
        return "somewhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some/model") == Path("somewhere")
    assert asked == files


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing", "../missing", "a/b/c", "~/missing", "", "some/mo del"]
)
def test_what_can_be_no_id_is_not_looked_up(cache: Path, model: str) -> None:
    with pytest.raises(HubError, match="there is no folder"):
        resolve_model(model)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["qwen3-8b-q4_k_m.gguf"], r"qwen3-8b-q4_k_m\.gguf, llama\.cpp's GGUF"),
        (["consolidated.safetensors", "params.json", "tekken.json"], "Mistral's own layout"),
        (["consolidated.00.pth", "params.json"], "Meta's own layout"),
        (["params.json"], "its publisher's own layout"),
        (["weights.00.npz"], "MLX's"),
    ],
)
def test_other_layouts_are_refused_by_name(files: list[str], named: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).touch()
    what_to_do = r"which is not read; use the repository in Hugging Face format \(config\.json, tokenizer\.json, model"
    with pytest.raises(UnsupportedModelError, match=f"{named}, {what_to_do}"):
        resolve_model(str(tmp_path))
    if not files[0].startswith("params"):
        with pytest.raises(UnsupportedModelError, match=f"{named.rpartition(', ')[2]}, {what_to_do}"):
            resolve_model(str(tmp_path / files[0]))
    write_checkpoint("qwen3", tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=f"{named}, {what_to_do}"):  # of its weights
        load(tmp_path)


def test_weights_that_mlx_lays_out_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint("qwen3-5", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, {"format": "mlx"})
    load(tmp_path)
    turned = {name: one.mT.contiguous() if "conv1d" in name else one for name, one in tensors.items()}
    save_file(turned, path, {"format": "mlx"})
    with pytest.raises(WeightsError, match=r"conv1d\.weight has shape .*; MLX wrote these files: use the repository"):
        load(tmp_path)
    save_file(turned, path)
    with pytest.raises(WeightsError, match=r"config\.json makes it \[\d+, 1, \d+\]$"):
        load(tmp_path)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(HubError, match="is a file; give the folder"):
        resolve_model(str(file))


def test_the_links_of_a_cached_adapter_are_followed(snapshot: Path, tmp_path: Path) -> None:
    assert resolve_adapter(str(snapshot)) == snapshot
    (tmp_path / "latest").symlink_to(snapshot)  # the folder itself may be a link
    assert resolve_adapter(str(tmp_path / "latest")) == tmp_path / "latest"
    within = snapshot / "within"
    within.mkdir()
    (within / "adapter_config.json").symlink_to("../../../blobs/0")
    assert resolve_adapter(str(within)) == within


@pytest.mark.parametrize("target", ["secret", "models--other--model/blobs/0", "cache/models--some--model/refs/main"])
@pytest.mark.parametrize("where", ["adapter", "cache/models--some--model/snapshots/abc", "snapshots/abc"])
def test_links_out_of_the_folder_of_an_adapter_are_refused(
    snapshot: Path, tmp_path: Path, where: str, target: str
) -> None:
    secret, folder = tmp_path / target, tmp_path / where
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(b"12345678 of the secret")
    (folder / "within").mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    for link in ("adapter_model.safetensors", "within/adapter_model.safetensors"):
        (folder / link).symlink_to(secret)
        with pytest.raises(AdapterError) as error:
            resolve_adapter(str(folder))
        assert str(error.value) == (
            f"adapter: {folder} has a link that leads to no file within it, adapter_model.safetensors; copy the file "
            "into the folder"
        )
        (folder / link).unlink()
    (folder / "other.json").symlink_to("adapter_config.json")
    (folder / "within" / "up").symlink_to("..")
    assert resolve_adapter(str(folder)) == folder


def test_circular_links_in_the_folder_of_an_adapter_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").symlink_to("adapter_config.json")
    with pytest.raises(AdapterError, match=r"leads to no file within it, adapter_config\.json"):
        resolve_adapter(str(tmp_path))
