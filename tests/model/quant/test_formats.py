"""Every format unpacks what an encoder wrote one number at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.model.fields import Fields
from aengine.model.quant.base import LinearFormat, StoredTensor
from aengine.model.quant.config import read_quantization
from aengine.model.quant.formats.awq import AwqGemv
from aengine.model.quant.read_plan import why_indivisible

from .encoders import Encoded, awq_gemv, gptq, pack_quantized
from .schemes import SCHEMES

PREFIX = "model.layers.0.mlp.up_proj"
SAFETENSORS = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


def format_of(scheme: str, module: str = PREFIX) -> LinearFormat:
    config = read_quantization(Fields({"quantization_config": SCHEMES[scheme].config}, "config.json"))
    assert config is not None
    linear = config.format_of(module)
    assert linear is not None
    return linear


def random(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def encode(scheme: str, n: int, k: int, seed: int = 0) -> Encoded:
    return SCHEMES[scheme].encode(random(n, k, seed), torch.Generator().manual_seed(seed))


def as_read(stored: StoredTensor, tensor: Tensor) -> Tensor:
    """Return the tensor as it is read: with the shape that the format expects, which may be longer."""
    if stored.at_most:
        assert len(tensor) <= stored.shape[0]
        return F.pad(tensor, (0, stored.shape[0] - len(tensor)))
    assert tuple(tensor.shape) in (stored.shape, *stored.other_shapes)
    return tensor.reshape(stored.shape)


def load(linear: LinearFormat, n: int, k: int, encoded: Sequence[Encoded], prefixes: Sequence[str]) -> QuantizedWeight:
    """Unpack as the loader does: check headers, then fill tensors with a leading axis if there are several experts."""
    places: dict[str, list[Tensor]] = {}
    for prefix, one in zip(prefixes, encoded, strict=True):
        files = {f"{prefix}.{suffix}": tensor for suffix, tensor in one.tensors.items()}
        for stored in linear.stored(prefix, n, k):
            tensor = files.pop(stored.name, None)
            if tensor is None:
                assert stored.optional, stored.name
                continue
            assert SAFETENSORS[tensor.dtype] in stored.dtypes
            places.setdefault(stored.key, []).append(as_read(stored, tensor))
        assert not files, "the format reads all that there is"
    alone = len(prefixes) == 1
    tensors = {key: parts[0] if alone else torch.stack(parts) for key, parts in places.items()}
    return linear.unpack(prefixes, n, k, tensors)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(n=st.integers(1, 3), k=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_a_matrix_that_was_encoded_comes_back_as_what_its_numbers_mean(scheme: str, n: int, k: int, seed: int) -> None:
    n, k = 8 * n, 32 * k
    encoded = encode(scheme, n, k, seed)
    weight = load(format_of(scheme), n, k, [encoded], [PREFIX])
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=encoded.rtol, atol=0)


@pytest.mark.parametrize(
    "scheme", [name for name in SCHEMES if name.startswith(("gptq", "awq", "ct-int4")) and name != "awq-gemv"]
)
@pytest.mark.parametrize("k", [40, 72, 104])
def test_the_last_group_of_a_row_may_be_shorter(scheme: str, k: int) -> None:
    encoded = encode(scheme, 16, k)
    weight = load(format_of(scheme), 16, k, [encoded], [PREFIX])
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=encoded.rtol, atol=0)


@pytest.mark.parametrize(("group", "k"), [(32, 1056), (64, 1088), (128, 384), (256, 2304), (-1, 96)])
def test_zeros_and_scales_of_gemv_are_padded(group: int, k: int) -> None:
    encoded = awq_gemv(random(8, k), torch.Generator(), group=group)
    weight = load(AwqGemv(group), 8, k, [encoded], [PREFIX])
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=0, atol=0)


def test_ranks_cannot_cut_words_of_zeros_of_gemv() -> None:
    stored = AwqGemv(32).stored(PREFIX, 8, 512)
    assert "qzeros is of 256 columns each" in why_indivisible(stored, 512, [(0, 128)])
    assert not why_indivisible(stored, 512, [(256, 512)])
    assert "qzeros is of 256 columns each" in why_indivisible(AwqGemv(32).stored(PREFIX, 8, 128), 128, [(0, 64)])


@pytest.mark.parametrize(("group", "k"), [(64, 96), (16, 64)])
def test_groups_that_gemv_does_not_have_are_refused(group: int, k: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{PREFIX}: {k} inputs in groups of {group} are unknown"):
        AwqGemv(group).stored(PREFIX, 8, k)


@pytest.mark.parametrize("scheme", ["fp8-blocks", "ct-fp8-block", "fp8-blocks-part-unchanged"])
@pytest.mark.parametrize(("n", "k"), [(256, 128), (257, 129), (1, 1), (130, 384)])
def test_blocks_may_be_cut_off_at_both_edges(scheme: str, n: int, k: int) -> None:
    encoded = encode(scheme, n, k)
    weight = load(format_of(scheme), n, k, [encoded], [PREFIX])
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=encoded.rtol, atol=0)


@given(n=st.integers(1, 20), k=st.integers(1, 20), symmetric=st.booleans())
def test_pack_quantized_pads_words_at_both_edges(n: int, k: int, symmetric: bool) -> None:
    encoded = pack_quantized(random(n, k), torch.Generator(), group=-1, symmetric=symmetric)
    config = {**SCHEMES["ct-int4-channel"].config}
    weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": symmetric}
    config["config_groups"] = {"g": {"targets": ["Linear"], "weights": weights}}
    quant = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert quant is not None
    linear = quant.format_of(PREFIX)
    assert linear is not None
    weight = load(linear, n, k, [encoded], [PREFIX])
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=encoded.rtol, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_stored_one_by_one_unpack_together(scheme: str) -> None:
    encoded = [encode(scheme, 16, 64, seed) for seed in range(3)]
    prefixes = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(3)]
    weight = load(format_of(scheme, prefixes[0]), 16, 64, encoded, prefixes)
    meant = torch.stack([one.meant for one in encoded])
    torch.testing.assert_close(weight.dequantize(), meant, rtol=encoded[0].rtol, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_unpacks_the_same(scheme: str) -> None:
    linear, encoded = format_of(scheme), encode(scheme, 16, 64)
    there = {f"{PREFIX}.{suffix}": tensor for suffix, tensor in encoded.tensors.items()}
    stored = [one for one in linear.stored(PREFIX, 16, 64) if one.name in there]
    tensors = {one.key: as_read(one, there[one.name]).cuda() for one in stored}
    weight = linear.unpack([PREFIX], 16, 64, tensors)
    torch.testing.assert_close(weight.dequantize().cpu(), encoded.meant, rtol=encoded.rtol, atol=0)
    fused = weight.cat([weight], ["gate_proj", "up_proj"])
    torch.testing.assert_close(fused.dequantize().cpu(), torch.cat([encoded.meant] * 2), rtol=encoded.rtol, atol=0)


def test_canonical_dtypes_and_shapes() -> None:
    fp8 = load(format_of("fp8-blocks"), 256, 128, [encode("fp8-blocks", 256, 128)], [PREFIX])
    assert isinstance(fp8, Fp8Weight)
    assert (fp8.weight.dtype, fp8.scale.dtype, fp8.scale.shape) == (torch.float8_e4m3fn, torch.float32, (2, 1))
    assert (fp8.block, fp8.activations, fp8.input_scale) == ((128, 128), "group", None)
    static = load(format_of("ct-fp8-tensor-static"), 8, 64, [encode("ct-fp8-tensor-static", 8, 64)], [PREFIX])
    assert isinstance(static, Fp8Weight)
    assert (static.block, static.scale.shape, static.activations) == ((8, 64), (1, 1), "static")
    assert static.input_scale is not None
    assert (static.input_scale.shape, static.input_scale.dtype) == ((), torch.float32)
    int4 = load(format_of("gptq-v2"), 8, 64, [encode("gptq-v2", 8, 64)], [PREFIX])
    assert isinstance(int4, Int4Weight)
    assert int4.zero is not None
    assert int4.order is not None
    assert (int4.codes.dtype, int4.codes.shape, int4.scale.shape, int4.group) == (torch.uint8, (8, 64), (8, 4), 16)
    assert (int4.zero.dtype, int4.zero.shape, int4.order.dtype) == (torch.uint8, (8, 4), torch.int64)


@pytest.mark.parametrize("scheme", ["gptq", "ct-int4", "ct-int4-channel"])
def test_symmetric_weights_have_no_zeros_and_no_order(scheme: str) -> None:
    weight = load(format_of(scheme), 8, 64, [encode(scheme, 8, 64)], [PREFIX])
    assert isinstance(weight, Int4Weight)
    assert weight.zero is None
    assert weight.order is None


def test_a_zero_of_nothing_survives_the_borrow_of_gptq_v1() -> None:
    """A zero that is stored as -1 borrows from its neighbour, since writers subtract from whole words."""
    w = random(8, 16).abs()  # no negative number, so zeros are 0
    encoded = gptq(w, torch.Generator(), group=16, symmetric=False, version=1)
    assert encoded.tensors["qzeros"].tolist() == [[-0x11111111]]
    weight = load(format_of("gptq"), 8, 16, [encoded], [PREFIX])
    assert isinstance(weight, Int4Weight)
    assert weight.zero is not None
    assert not weight.zero.any()
    torch.testing.assert_close(weight.dequantize(), encoded.meant, rtol=encoded.rtol, atol=0)


def used_scales(scheme: str, encoded: Encoded) -> list[str]:
    """Return the suffixes of scales in floats. NVFP4's scales of inputs are not used."""
    return [
        suffix
        for suffix, tensor in encoded.tensors.items()
        if "scale" in suffix and tensor.is_floating_point() and not ("nvfp4" in scheme and "input" in suffix)
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_no_numbers_are_named(scheme: str, bad: float) -> None:
    encoded = encode(scheme, 16, 64)
    for suffix in used_scales(scheme, encoded):
        changed = encoded.tensors[suffix].clone().float()
        changed.view(-1)[-1] = bad if encoded.tensors[suffix].element_size() > 1 else float("nan")
        changed = changed.to(encoded.tensors[suffix].dtype)
        damaged = Encoded({**encoded.tensors, suffix: changed}, encoded.meant)
        with pytest.raises(WeightsError, match=f"{PREFIX}.{suffix} holds"):
            load(format_of(scheme), 16, 64, [damaged], [PREFIX])


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "fp8" in name or name.startswith("ct")])
def test_scales_below_zero_are_named(scheme: str) -> None:
    encoded = encode(scheme, 16, 64)
    for suffix in used_scales(scheme, encoded):
        below = (-encoded.tensors[suffix].float()).to(encoded.tensors[suffix].dtype)
        damaged = Encoded({**encoded.tensors, suffix: below}, encoded.meant)
        with pytest.raises(WeightsError, match=f"{PREFIX}.{suffix} holds -"):
            load(format_of(scheme), 16, 64, [damaged], [PREFIX])


@pytest.mark.parametrize("scheme", ["ct-mxfp4", "ct-mxfp8", "modelopt-mxfp8"])
def test_exponents_beyond_float32_are_named(scheme: str) -> None:
    encoded = encode(scheme, 16, 64)
    encoded.tensors["weight_scale"][3, 1] = 255
    with pytest.raises(WeightsError, match=f"{PREFIX}.weight_scale holds 255"):
        load(format_of(scheme), 16, 64, [encoded], [PREFIX])


@pytest.mark.parametrize("field", ["blocksize", "shape", "quant_type", "nested_blocksize"])
def test_settings_of_bitsandbytes_that_differ_are_named(field: str) -> None:
    suffix = "weight.quant_state.bitsandbytes__nf4"
    encoded = encode("bnb-nf4", 16, 64)
    state = json.loads(bytes(encoded.tensors[suffix].tolist()))
    state[field] = {"shape": [64, 16], "quant_type": "fp4"}.get(field, 128)
    encoded.tensors[suffix] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(WeightsError, match=f"{PREFIX}.{suffix}: {field} is .*, must be "):
        load(format_of("bnb-nf4"), 16, 64, [encoded], [PREFIX])
    encoded.tensors[suffix] = torch.tensor(list(b"{"), dtype=torch.uint8)
    with pytest.raises(WeightsError, match=f"{PREFIX}.{suffix}: Input data was truncated"):
        load(format_of("bnb-nf4"), 16, 64, [encoded], [PREFIX])


def test_an_input_scale_of_zero_would_divide_by_it() -> None:
    encoded = encode("autofp8", 16, 64)
    damaged = Encoded({**encoded.tensors, "input_scale": torch.tensor(0.0)}, encoded.meant)
    with pytest.raises(WeightsError, match=r"up_proj.input_scale holds 0"):
        load(format_of("autofp8"), 16, 64, [damaged], [PREFIX])


def test_the_expert_with_the_bad_scale_is_named() -> None:
    encoded = [encode("fp8-blocks", 16, 64, seed) for seed in range(3)]
    encoded[2].tensors["weight_scale_inv"].fill_(float("nan"))
    prefixes = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(3)]
    with pytest.raises(WeightsError, match=r"experts\.2\.up_proj\.weight_scale_inv holds nan"):
        load(format_of("fp8-blocks", prefixes[0]), 16, 64, encoded, prefixes)


@pytest.mark.parametrize("scheme", ["gptq-desc-act", "ct-int4-actorder"])
@pytest.mark.parametrize("damage", ["beyond", "below", "uneven"])
def test_an_order_that_is_none_is_refused_by_name(scheme: str, damage: str) -> None:
    encoded = encode(scheme, 8, 64)
    suffix = next(suffix for suffix in encoded.tensors if "g_idx" in suffix)
    g_idx = encoded.tensors[suffix]
    if damage == "uneven":
        g_idx[g_idx == 3] = 2
    else:
        g_idx[5] = 2**30 if damage == "beyond" else -1
    with pytest.raises(WeightsError, match=f"{PREFIX}.{suffix} does not name 16 columns a group"):
        load(format_of(scheme), 8, 64, [encoded], [PREFIX])


def test_an_order_that_was_never_made_is_none() -> None:
    encoded = encode("ct-int4", 8, 64)
    encoded.tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    weight = load(format_of("ct-int4"), 8, 64, [encoded], [PREFIX])
    assert isinstance(weight, Int4Weight)
    assert weight.order is None


def test_a_weight_shape_that_differs_is_refused_by_name() -> None:
    encoded = encode("ct-int4", 8, 64)
    encoded.tensors["weight_shape"] = torch.tensor([64, 8])
    with pytest.raises(WeightsError, match=r"up_proj.weight_shape says \[64, 8\], config.json \[8, 64\]"):
        load(format_of("ct-int4"), 8, 64, [encoded], [PREFIX])


@pytest.mark.parametrize(
    ("scheme", "n", "k"),
    [("gptq", 8, 20), ("gptq", 12, 16), ("awq", 12, 32), ("awq", 8, 33), ("awq-gemv", 8, 33), ("ct-int4", 8, 33)],
)
def test_shapes_that_a_format_cannot_hold_are_refused(scheme: str, n: int, k: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{PREFIX}: .*no multiple of"):
        format_of(scheme).stored(PREFIX, n, k)


def test_fp8_experts_fused_in_three_axes() -> None:
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    encoded = [encode("fp8-blocks", 160, 64, seed) for seed in range(2)]
    linear = format_of("fp8-blocks", prefix)
    stored = {one.key: one for one in linear.stored(prefix, 160, 64, experts=2)}
    assert stored["weight"].name == prefix
    assert stored["weight"].shape == (2, 160, 64)
    assert stored["scale"].name == f"{prefix}_scale_inv"
    assert stored["scale"].shape == (2, 2, 1)
    tensors = {
        "weight": torch.stack([one.tensors["weight"] for one in encoded]),
        "scale": torch.stack([one.tensors["weight_scale_inv"] for one in encoded]),
    }
    weight = linear.unpack([prefix], 160, 64, tensors)
    meant = torch.stack([one.meant for one in encoded])
    torch.testing.assert_close(weight.dequantize(), meant, rtol=0, atol=0)
    tensors["scale"][1, 0, 0] = float("nan")
    with pytest.raises(WeightsError, match=f"{prefix}_scale_inv holds nan"):
        linear.unpack([prefix], 160, 64, tensors)


@pytest.mark.parametrize("scheme", ["awq", "awq-gemv", "gptq", "ct-int4", "ct-fp8-block", "autofp8"])
def test_other_formats_have_no_fused_experts(scheme: str) -> None:
    with pytest.raises(UnsupportedModelError, match="experts fused in one tensor are not known"):
        format_of(scheme).stored("model.layers.0.mlp.experts.gate_up_proj", 16, 64, experts=2)
