"""Which checkpoints have an MTP layer, what is read of it, and what it adds to the model's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aengine.attention.torch_backend import TorchAttention
from aengine.cache.kv import KVPool, SlidingLayers
from aengine.errors import ConfigError, WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import entries_of
from aengine.model.loading.load import matching_checkpoint, open_checkpoint
from aengine.model.lora.room import LoraRoom
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.mtp_checkpoints import MTP_CASES, change_text_config, write_mtp_checkpoint
from tests.model.drafting.mtp_drafts import assert_equal, draft, load
from tests.model.quant.checkpoints import write_quantized
from tests.model.quant.schemes import SCHEMES

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def read(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)


def meta(config: ModelConfig) -> Decoder:
    return Decoder(config, TorchKernels(), TorchAttention())


def change_tensors(folder: Path, added: dict[str, Tensor], dropped: str = "") -> None:
    path = folder / "model.safetensors"
    kept = {name: one for name, one in load_file(path).items() if not dropped or not name.startswith(dropped)}
    save_file({**kept, **added}, path)


# ---- whether there is one


@pytest.mark.parametrize("case", MTP_CASES)
def test_without_drafting_the_layer_is_ignored(case: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(case, tmp_path)
    config = read(tmp_path)
    assert config.mtp is not None
    assert not config.no_drafting
    decoder = meta(config)
    open_checkpoint(tmp_path, decoder)
    assert decoder.draft_head is None
    assert not [name for name in entries_of(decoder.groups) if name.startswith(config.mtp.prefix)]


def test_a_layer_that_the_weights_lack_is_missed_in_words(tmp_path: Path) -> None:
    """Many writers of quantised files drop it."""
    write_checkpoint("qwen3-5-wrapped", tmp_path)
    change_text_config(tmp_path, mtp_num_hidden_layers=1)
    config = read(tmp_path)
    assert config.mtp is None
    assert config.no_drafting == "config.json names an MTP layer, but the weights have no tensors of it"
    with pytest.raises(ConfigError, match=r"^drafting: config\.json names an MTP layer, .* of it; leave it out$"):
        config.with_drafting()
    open_checkpoint(tmp_path, meta(config))


@pytest.mark.parametrize("case", ["qwen3", "qwen3-next", "llama2", "deepseek-v2"])
def test_a_model_that_has_none(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    config = read(tmp_path)
    assert config.mtp is None
    assert config.no_drafting == "the checkpoint has no MTP layer"


def test_none_of_zero_layers_is_used(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3-5", tmp_path)
    change_text_config(tmp_path, mtp_num_hidden_layers=0)
    assert read(tmp_path).no_drafting == "the checkpoint has no MTP layer"


def test_the_first_of_several_layers_is_used(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3-5", tmp_path)
    change_text_config(tmp_path, mtp_num_hidden_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    second = {name.replace("layers.0", "layers.1"): one for name, one in tensors.items() if "mtp.layers.0" in name}
    change_tensors(tmp_path, {name: torch.zeros_like(one) for name, one in second.items()})
    config = read(tmp_path).with_drafting()
    assert len(config.draft_kv_layers) == 1
    open_checkpoint(tmp_path, meta(config))


def test_a_model_without_weights_has_the_layer_that_config_json_names(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    drafts = draft(load(tmp_path, load_format="dummy"))
    assert all(logits.isfinite().all() for of_one in drafts for logits in of_one)


def test_a_model_without_an_output_matrix_drafts_nothing(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3Model"]}))
    assert read(tmp_path).no_drafting == "the checkpoint has no MTP layer"


# ---- what is read


def test_a_tensor_that_the_layer_does_not_have_is_refused(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)
    change_tensors(tmp_path, {"mtp.fc.bias": torch.zeros(64)})
    config = read(tmp_path)
    open_checkpoint(tmp_path, meta(config))
    with pytest.raises(WeightsError, match=r"mtp\.fc\.bias, which this model does not have"):
        open_checkpoint(tmp_path, meta(config.with_drafting()))


def test_a_copy_of_the_embedding_is_ignored_and_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3-5", tmp_path)
    change_tensors(tmp_path, {"mtp.embed_tokens.weight": torch.zeros(128, 64)})
    open_checkpoint(tmp_path, meta(read(tmp_path).with_drafting()))
    change_text_config(tmp_path, mtp_use_dedicated_embeddings=True)
    open_checkpoint(tmp_path, meta(read(tmp_path)))
    with pytest.raises(WeightsError, match=r"mtp\.embed_tokens\.weight, which this model does not have"):
        open_checkpoint(tmp_path, meta(read(tmp_path).with_drafting()))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    write_mtp_checkpoint("deepseek-v3", tmp_path)
    change_tensors(tmp_path, {}, dropped="model.layers.3.hnorm")
    with pytest.raises(WeightsError, match=r"lack model\.layers\.3\.hnorm\.weight"):
        open_checkpoint(tmp_path, meta(read(tmp_path).with_drafting()))


def test_embedding_and_output_matrix_are_not_read_again(tmp_path: Path) -> None:
    write_mtp_checkpoint("deepseek-v3", tmp_path)
    names = entries_of(meta(read(tmp_path).with_drafting()).groups)
    assert "model.layers.3.shared_head.norm.weight" in names
    assert not [name for name in names if name.startswith(("model.layers.3.embed", "model.layers.3.shared_head.head"))]


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3-next", tmp_path)
    expected = draft(load(tmp_path))
    fuse_experts(tmp_path, "mtp.layers.0.mlp.experts")
    assert_equal(draft(load(tmp_path)), expected)


def fuse_experts(folder: Path, experts: str) -> None:
    """Replace the matrices of single experts by two tensors with those of all experts."""
    tensors = load_file(folder / "model.safetensors")
    count = sum(name.startswith(experts) and name.endswith("up_proj.weight") for name in tensors)
    if not count:
        return
    gate, up, down = (
        torch.stack([tensors[f"{experts}.{i}.{part}_proj.weight"] for i in range(count)])
        for part in ("gate", "up", "down")
    )
    fused = {f"{experts}.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.down_proj": down}
    change_tensors(folder, fused, dropped=f"{experts}.")


@pytest.mark.parametrize(
    ("case", "scheme", "floats"),
    [
        ("qwen3", "fp8-blocks-part-unchanged", ()),
        ("deepseek-v3", "fp8-blocks", ()),
        ("deepseek-v3", "fp8-blocks", ("eh_proj",)),
        ("qwen3", "gptq-desc-act", ("mtp",)),
        ("qwen3-next", "ct-int4", ("mtp",)),
        ("qwen3-next", "ct-fp8-channel", ()),
    ],
)
def test_each_matrix_has_the_format_in_which_it_is_stored(
    case: str, scheme: str, floats: tuple[str, ...], tmp_path: Path
) -> None:
    """floats: matrices that the files have in floats, although the settings do not say so. `mtp.fc` always is."""
    chosen = SCHEMES[scheme]
    chosen = replace(chosen, unchanged=(*chosen.unchanged, *floats))
    write_quantized(chosen, case, tmp_path / "quantised", tmp_path / "twin", write_mtp_checkpoint)
    if "mtp" in floats:
        fuse_experts(tmp_path / "quantised", "mtp.layers.0.mlp.experts")
    for ours, expected in zip(draft(load(tmp_path / "quantised")), draft(load(tmp_path / "twin")), strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(expected), atol=2e-3, rtol=0)


# ---- memory


@pytest.mark.parametrize("case", ["qwen3-5", "deepseek-v3"])
def test_a_page_has_the_layer_too(case: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(case, tmp_path)
    plain = read(tmp_path)
    drafting = plain.with_drafting()
    assert plain.draft_kv_layers == ()
    layers = plain.kv_shape(16, BF16).layers
    assert drafting.kv_shape(16, BF16).layers == (*layers, layers[-1])
    head = meta(drafting).draft_head
    assert head is not None
    assert head.kv_layers == drafting.draft_kv_layers == layers[-1:]


def test_the_layer_has_no_window(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    config = read(tmp_path).with_drafting()
    assert config.windows == [8, 8]
    assert config.mtp is not None
    assert config.mtp.attention.window is None
    kv = KVPool(config.kv_shape(4, BF16), 9, CPU, SlidingLayers(config.sliding, 5))
    assert [len(kv.layer(i)[0]) for i in range(3)] == [5, 5, 9]  # pages


def test_weights_count_the_layer(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)
    plain = read(tmp_path)
    drafting = plain.with_drafting()
    sizes = {name: one.numel() for name, one in load_file(tmp_path / "model.safetensors").items()}
    added = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    copied = plain.vocab_size * plain.hidden_size  # in FP8
    assert drafting.weight_bytes(BF16) == plain.weight_bytes(BF16) + 2 * added + copied
    assert drafting.weight_bytes(torch.float32) == plain.weight_bytes(torch.float32) + 4 * added
    assert drafting.spread_over(2).weight_bytes(BF16) == drafting.weight_bytes(BF16) // 2
    assert drafting.parameters == plain.parameters


def test_columns_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path, num_attention_heads=4, num_key_value_heads=4)
    change_text_config(tmp_path, mtp_intermediate_size=42)
    config = read(tmp_path)
    for spread in (config.spread_over(4).with_drafting, partial(config.with_drafting().spread_over, 4)):
        with pytest.raises(ConfigError, match="42 columns of the MLP cannot be divided evenly among 4 ranks"):
            spread()


# ---- next to adapters and reloads


def test_adapters_change_no_draft(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)
    kinds = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj", "lm_head")
    decoder = load(tmp_path, lora=LoraRoom(places=1, rank=8, kinds=kinds))
    memory = decoder.adapters
    assert memory is not None
    assert not [name for name in memory.sites if name.startswith("mtp.")]
    for site in memory.sites.values():
        if site.weights is not None:
            site.weights.a.fill_(1.0)
            site.weights.b.fill_(1.0)
    memory.tokens.places = torch.ones(1, dtype=torch.int32)
    head, hidden = decoder.draft_head, torch.randn(1, 64)
    assert head is not None
    with torch.inference_mode():
        changed = decoder.logits(hidden, torch.ones(1, dtype=torch.int32))
        assert not torch.equal(head.logits(hidden), changed)
        torch.testing.assert_close(head.logits(hidden), load(tmp_path).logits(hidden))


def test_a_reload_needs_the_layer_only_if_it_is_loaded(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3", tmp_path)
    loaded = read(tmp_path)
    matching_checkpoint(tmp_path, loaded, loaded.with_drafting())
    change_text_config(tmp_path, mtp_intermediate_size=24)
    with pytest.raises(WeightsError, match="mtp is "):
        matching_checkpoint(tmp_path, read(tmp_path), loaded.with_drafting())
    change_tensors(tmp_path, {}, dropped="mtp.")
    matching_checkpoint(tmp_path, read(tmp_path), loaded)
    with pytest.raises(WeightsError, match="the weights have no tensors of it; the loaded model drafts with one"):
        matching_checkpoint(tmp_path, read(tmp_path), loaded.with_drafting())


def test_a_process_that_compiles_kernels_gets_the_layer(tmp_path: Path) -> None:
    write_mtp_checkpoint("deepseek-v3", tmp_path)
    config = read(tmp_path).with_drafting()
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config
