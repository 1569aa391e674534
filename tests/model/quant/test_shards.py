"""Ranks of a quantised model read their own parts of tensors, and give the logits of the dequantised twin."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aengine.errors import ConfigError, UnsupportedModelError
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.groups import entries_of

from ..ranks import Ranks
from .checkpoints import write_quantized
from .encoders import Scheme
from .schemes import OF_MODELS, SCHEMES, slow_but_some

PROMPTS = [list(range(1, 20)), [7, 3, 7]]
HEADS = {"num_attention_heads": 8, "head_dim": 16}
DENSE = {**HEADS, "intermediate_size": 256, "vocab_size": 136}
EXPERTS = {**HEADS, "num_experts": 9, "moe_intermediate_size": 64}
# The number of columns that share a scale or an element: of o_proj, and of down_proj.
TOGETHER = {
    **dict.fromkeys(("fp8-blocks", "fp8-blocks-part-unchanged", "ct-fp8-block"), (1, 128)),
    **dict.fromkeys(("ct-int4", "awq"), (32, 32)),
    **dict.fromkeys(("ct-int4-zeros", "gptq"), (16, 16)),
    **dict.fromkeys(("modelopt-nvfp4-beside", "ct-nvfp4"), (16, 16)),
    **dict.fromkeys(("ct-int4-channel", "gptq-asymmetric"), (8, 8)),
    **dict.fromkeys(("fp8-tensor-static", "autofp8", "ct-fp8-channel", "ct-fp8-tensor-static"), (1, 1)),
    **dict.fromkeys(("ct-mxfp4", "ct-mxfp8"), (32, 32)),
    **dict.fromkeys(("ct-int8-packed",), (4, 4)),
    **dict.fromkeys(("ct-int8", "bnb-int8"), (1, 1)),
}
ORDERED = ("ct-int4-actorder", "gptq-desc-act", "gptq-v2", "gptq-int8", "bnb-nf4")


def logits(folder: Path, count: int) -> Tensor:
    ranks = Ranks(folder, count).generate(PROMPTS, 4)
    rows = [torch.stack([torch.stack(one.logits) for one in sequences]) for sequences in ranks]
    assert all(torch.equal(one, rows[0]) for one in rows)
    return rows[0]


def assert_equal(folder: Path, count: int) -> None:
    torch.testing.assert_close(logits(folder / "quantised", count), logits(folder / "twin", 1), atol=1e-3, rtol=0)


def write(folder: Path, scheme: str | Scheme, case: str, **sizes: object) -> Path:
    write_quantized(scheme, case, folder / "quantised", folder / "twin", **sizes)
    return folder


@pytest.fixture(scope="module", params=slow_but_some(quick=("fp8-blocks-part-unchanged", "gptq-desc-act")))
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write(tmp_path_factory.mktemp(request.param), request.param, "qwen3-bias-untied", **DENSE)


@pytest.mark.turns("count")
@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 8))])
def test_logits_are_those_of_the_dequantised_twin(dense: tuple[str, Path], count: int) -> None:
    """Each scheme is tested with one of the numbers of ranks in turn."""
    scheme, folder = dense
    if scheme not in ORDERED and (128 // count % TOGETHER[scheme][0] or 256 // count % TOGETHER[scheme][1]):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size: .* columns each, .* no multiple; lower it"):
            Ranks(folder / "quantised", count)
    else:
        assert_equal(folder, count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["fp8-blocks", "gptq", "ct-int4-zeros"])
def test_rows_that_are_interleaved_by_head(scheme: str, count: int, tmp_path: Path) -> None:
    known = SCHEMES[scheme]
    key = "ignore" if "config_groups" in known.config else "modules_to_not_convert"
    names = [f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in range(3)]
    chosen = Scheme({**known.config, key: ["lm_head", *names]}, known.encode)
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 128}
    assert_equal(write(tmp_path, chosen, "qwen3-next", **HEADS, **sizes, shared_expert_intermediate_size=512), count)


def test_ranks_share_the_tensors_without_reading_any_of_it_twice(dense: tuple[str, Path]) -> None:
    scheme, folder = dense
    [alone], ranks = Ranks(folder / "quantised", 1).decoders, Ranks(folder / "quantised", 2).decoders
    for name, entry in entries_of(alone.groups).items():
        if not name.endswith((".weight", ".qweight", ".weight_packed")) or "norm" in name:
            continue
        kept = sum(math.prod(entries_of(rank.groups)[name].kept) for rank in ranks)
        # If columns have their own order, all are read and some are picked afterwards. So is all of a flat matrix.
        picked = entry.dtypes == ("U8",) if "nf4" in scheme else ".o_proj." in name or ".down_proj." in name
        whole = 2 if scheme in ORDERED and picked else 1
        assert kept == whole * math.prod(entry.shape), name


@pytest.fixture(scope="module", params=slow_but_some(scheme for scheme in OF_MODELS if scheme not in ORDERED))
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write(tmp_path_factory.mktemp(request.param), request.param, "qwen3-moe", **EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_have_whole_experts_if_columns_cannot_be_divided(mixture: tuple[str, Path], count: int) -> None:
    scheme, folder = mixture
    if 128 // count % TOGETHER[scheme][0]:  # ranks cannot share the columns of attention's output
        with pytest.raises(ConfigError, match=r"o_proj.* columns each, .* no multiple; lower it"):
            Ranks(folder / "quantised", count)
    else:
        assert_equal(folder, count)


@pytest.mark.parametrize(
    ("columns", "count"),
    [
        pytest.param(64, 2, id="whole blocks of rows", marks=pytest.mark.slow),
        pytest.param(64, 4, id="half a block of rows"),
        pytest.param(256, 4, id="experts", marks=pytest.mark.slow),
    ],
)
def test_experts_in_one_tensor(columns: int, count: int, tmp_path: Path) -> None:
    usual = SCHEMES["fp8-blocks-part-unchanged"]
    config = {**usual.config, "modules_to_not_convert": ["lm_head"]}
    changed = dataclasses.replace(usual, config=config, unchanged=("lm_head",))
    write(tmp_path, changed, "qwen3-moe", **{**EXPERTS, "moe_intermediate_size": columns})
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        for stored, fused in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            gate, up, down = (
                torch.stack([tensors.pop(f"{name}.{expert}.{part}_proj.{stored}") for expert in range(9)])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{name}.gate_up_proj{fused}": torch.cat((gate, up), 1), f"{name}.down_proj{fused}": down}
    save_file(tensors, file, {"format": "pt"})
    assert_equal(tmp_path, count)


@pytest.mark.parametrize("scheme", [pytest.param("ct-int4-actorder", marks=pytest.mark.slow), "gptq-desc-act"])
def test_ranks_have_whole_experts_if_columns_are_ordered(scheme: str, tmp_path: Path) -> None:
    usual = SCHEMES[scheme]
    unquantised = {"ignore": ["lm_head", "re:.*self_attn.*"], "dynamic": {"-:.*self_attn.*": {}}}
    key = "ignore" if "ignore" in usual.config else "dynamic"
    config = {**usual.config, key: unquantised[key]}
    changed = dataclasses.replace(usual, config=config, unchanged=("lm_head", "self_attn"))
    assert_equal(write(tmp_path, changed, "qwen3-moe", **EXPERTS), 4)


def test_what_ranks_cannot_share_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "awq", "qwen3-bias-untied", **DENSE)
    monkeypatch.delattr(Checkpoint, "copy_into")
    with pytest.raises(ConfigError, match=r"o_proj.* is of 32 columns each, and a rank's 16 are no multiple; lower it"):
        Ranks(tmp_path / "quantised", 8)


def test_an_order_that_config_json_does_not_tell_is_refused_when_it_is_read(tmp_path: Path) -> None:
    usual = SCHEMES["gptq-desc-act"]
    changed = dataclasses.replace(usual, config={**usual.config, "desc_act": False})
    write(tmp_path, changed, "qwen3-bias-untied", **DENSE)
    with pytest.raises(
        UnsupportedModelError, match=r"g_idx orders columns \(desc_act\).*set tensor_parallel_size to 1"
    ):
        Ranks(tmp_path / "quantised", 2)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scheme",
    slow_but_some(
        ("gptq", "ct-int4-zeros", "ct-int4-channel", "ct-fp8-channel", "ct-fp8-tensor-static", "ct-fp8-block"),
        ("gptq", "ct-fp8-channel"),
    ),
)
def test_an_output_matrix_that_is_quantised(scheme: str, count: int, tmp_path: Path) -> None:
    """Ranks have whole elements of its rows, so the last ranks have fewer rows or none."""
    usual = SCHEMES[scheme]
    config = {**usual.config, "lm_head": True} if scheme == "gptq" else {**usual.config, "ignore": []}
    changed = dataclasses.replace(usual, config=config, unchanged=())
    inner = 1024 if scheme == "ct-fp8-block" else 256  # the smallest that is divisible
    assert_equal(write(tmp_path, changed, "qwen3-bias-untied", **{**DENSE, "intermediate_size": inner}), count)


@pytest.mark.parametrize(("columns", "experts"), [(64, 9), (128, 2), (512, 9)])
def test_ranks_have_whole_groups_of_128_columns_if_there_are_such_groups(
    columns: int, experts: int, tmp_path: Path
) -> None:
    """Other widths have no kernel. Then ranks have whole experts: of 9, the first of 4 ranks has two."""
    changes = {"num_hidden_layers": 1, "moe_intermediate_size": columns}
    write(tmp_path, "ct-fp8-tensor-static", "qwen3-moe", **{**EXPERTS, **changes})
    first = entries_of(Ranks(tmp_path / "quantised", 4).decoders[0].groups)
    assert len([name for name in first if name.endswith(".down_proj.weight")]) == experts


def test_neither_experts_nor_their_columns(tmp_path: Path) -> None:
    write(tmp_path, "fp8-blocks", "qwen3-moe", **{**EXPERTS, "num_experts": 3, "moe_intermediate_size": 256})
    with pytest.raises(
        ConfigError, match=r"neither the 3 experts of .*mlp\.experts nor their 256 columns can be divided among 4 ranks"
    ):
        Ranks(tmp_path / "quantised", 4)
