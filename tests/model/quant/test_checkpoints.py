"""Whole checkpoints: every tensor of the files is read, and the matrices equal those of the twin, fused or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.model.checkpoint.safetensors import read_header
from aengine.model.fields import Fields, read_json_object
from aengine.model.quant.base import LinearFormat
from aengine.model.quant.config import read_quantization

from .checkpoints import is_linear, write_quantized
from .schemes import slow_but_some
from .test_formats import as_read


@pytest.mark.parametrize("case", ["qwen3", pytest.param("llama-all-biases", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", slow_but_some())
def test_a_checkpoint_holds_what_its_twin_does(scheme: str, case: str, tmp_path: Path) -> None:
    folder, twin = tmp_path / "quantised", tmp_path / "twin"
    write_quantized(scheme, case, folder, twin)
    quant = read_quantization(Fields(read_json_object(folder / "config.json"), "config.json"))
    assert quant is not None
    header, stored, plain = (
        read_header(folder / "model.safetensors"),
        load_file(folder / "model.safetensors"),
        load_file(twin / "model.safetensors"),
    )
    unread, rtol = set(stored), 2.0**-22 if "nvfp4" in scheme else 0.0
    quantised: dict[str, tuple[LinearFormat, QuantizedWeight]] = {}
    for name, meant in plain.items():
        module = name.removesuffix(".weight")
        linear = quant.format_of(module) if is_linear(name) else None
        if linear is None:
            assert torch.equal(stored[name], meant)
            unread.remove(name)
            continue
        n, k = meant.shape
        tensors = {}
        for one in linear.stored(module, n, k):
            if one.name in header:
                assert header[one.name].dtype in one.dtypes
                tensors[one.key] = as_read(one, stored[one.name])
                unread.remove(one.name)
            else:
                assert one.optional
        quantised[module] = linear, linear.unpack([module], n, k, tensors)
        torch.testing.assert_close(quantised[module][1].dequantize(), meant, rtol=rtol, atol=0)
    assert not unread
    for layer in range(2):
        for block, parts in (("self_attn", ["q_proj", "k_proj", "v_proj"]), ("mlp", ["gate_proj", "up_proj"])):
            modules = [f"model.layers.{layer}.{block}.{part}" for part in parts]
            if quant.format_of(*modules) is not None:
                first, *others = (quantised[module][1] for module in modules)
                fused = first.cat(others, modules)
                meant = torch.cat([plain[f"{module}.weight"] for module in modules])
                torch.testing.assert_close(fused.dequantize(), meant, rtol=rtol, atol=0)
