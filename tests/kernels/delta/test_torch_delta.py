"""The reference of delta nets against transformers' layer."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from aengine.kernels.recurrent.state import RecurrentHeads
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.recurrent.nets import DeltaWorld
from tests.kernels.recurrent.world import Entry

HEADS = RecurrentHeads(key_heads=2, value_heads=6, key_dim=8, value_dim=12)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_the_layer_of_transformers_gives_the_same(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    make, config = {
        "qwen3_next": ("Qwen3NextGatedDeltaNet", transformers.Qwen3NextConfig),
        "qwen3_5": ("Qwen3_5GatedDeltaNet", transformers.Qwen3_5TextConfig),
    }[family]
    layer: Any = getattr(module, make)(
        config(
            hidden_size=32,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=HEADS.key_heads,
            linear_num_value_heads=HEADS.value_heads,
            linear_key_head_dim=HEADS.key_dim,
            linear_value_head_dim=HEADS.value_dim,
        ),
        0,
    ).float()
    torch.nn.init.normal_(layer.dt_bias)
    torch.nn.init.normal_(layer.norm.weight)
    x = torch.randn(100, 32)
    with torch.no_grad():
        expected = layer(x.unsqueeze(0))[0]
        if family == "qwen3_next":
            parts = layer.fix_query_key_value_ordering(
                layer.in_proj_qkvz(x.unsqueeze(0)), layer.in_proj_ba(x.unsqueeze(0))
            )
            q, k, v, z, b, a = (part.flatten(2)[0] for part in parts)
            qkv = torch.cat((q, k, v), dim=-1)
        else:
            qkv, z, b, a = layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
        it = DeltaWorld(HEADS, [1], torch.float32, torch.device("cpu"))
        it.weights.conv, it.weights.norm = layer.conv1d.weight.squeeze(1), layer.norm.weight
        it.weights.a_log, it.weights.dt_bias = layer.A_log, layer.dt_bias
        net = TorchKernels().delta_net(it.weights)
        batch, _ = it.batch([], [Entry(-1, 100, slot=2, source=0)])
        out = layer.out_proj(net(qkv, z, b, a, it.state, batch))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
