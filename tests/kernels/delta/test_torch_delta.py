"""The reference of delta nets against float64 token by token, and against transformers' layer."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from aengine.kernels.delta.base import DeltaHeads
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.delta.reference import Entry, World

CPU = torch.device("cpu")
HEADS = DeltaHeads(key_heads=2, value_heads=6, key_dim=8, value_dim=12)
EXACT = 3e-6


def world(*lengths: int, decay: float = 1.0) -> World:
    return World(HEADS, lengths, torch.float32, CPU, decay=decay)


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_a_chunk_equals_its_tokens_one_by_one(tokens: int, decay: float) -> None:
    it = world(tokens, decay=decay)
    net = TorchKernels().delta_net(it.weights)
    out, errors = it.run(net, [], [Entry(0, tokens, slot=3, source=0)])
    assert max(errors) < EXACT
    assert out.shape == (tokens, HEADS.values)


QUICK_CUTS = (1, 2, 31, 63, 64, 65, 100, 127, 128, 129, 139)  # other cases are slow tests


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=() if cut in QUICK_CUTS else pytest.mark.slow) for cut in range(1, 140)]
)
def test_a_sequence_may_be_divided_anywhere(cut: int) -> None:
    it = world(140)
    net = TorchKernels().delta_net(it.weights)
    _, first = it.run(net, [], [Entry(0, cut, slot=3, source=0)])
    _, rest = it.run(net, [], [Entry(0, 140 - cut, slot=3, source=3, at=cut)])
    assert max(first + rest) < EXACT


def test_tokens_one_by_one_equal_a_chunk() -> None:
    it = world(70, 9)
    net = TorchKernels().delta_net(it.weights)
    for t in range(70):
        second = [Entry(1, 1, slot=4, source=4 if t else 0, at=t)] if t < 9 else []
        _, errors = it.run(net, [Entry(0, 1, slot=3, source=3 if t else 0, at=t), *second])
        assert max(errors) < EXACT


def test_saved_states_are_read_again_with_the_same_bits() -> None:
    it = world(300, 70)
    net = TorchKernels().delta_net(it.weights)
    chunks = [
        Entry(0, 200, slot=3, source=0, saves={64: 5, 192: 6, 200: 7}),
        Entry(1, 70, slot=4, source=0, saves={64: 8}),
    ]
    whole, errors = it.run(net, [], chunks)
    assert max(errors) < EXACT
    for start, source in ((64, 5), (192, 6)):
        again, errors = it.run(net, [], [Entry(0, 200 - start, slot=9, source=source, at=start)])
        assert max(errors) < EXACT
        assert torch.equal(it.state.recurrence[9], it.state.recurrence[3])
        assert torch.equal(it.state.conv[9], it.state.conv[3])
        torch.testing.assert_close(again, whole[start:200], atol=1e-6, rtol=1e-6)
    # A fork continues from the end of the chunk in its own slot. The decode saves a state as well.
    _, errors = it.run(net, [Entry(0, 1, slot=10, source=7, at=200, saves={1: 11}), Entry(1, 0, 0, 0)][:1])
    assert max(errors) < EXACT
    assert torch.equal(it.state.recurrence[10], it.state.recurrence[11])
    assert torch.equal(it.state.conv[10], it.state.conv[11])
    _, errors = it.run(net, [Entry(0, 1, slot=3, source=11, at=201)])
    assert max(errors) < EXACT


def test_steps_mix_decodes_chunks_and_padding() -> None:
    it = world(100, 130, 5, 20)
    net = TorchKernels().delta_net(it.weights)
    _, errors = it.run(net, [], [Entry(0, 90, 3, 0), Entry(1, 33, 4, 0), Entry(2, 2, 5, 0), Entry(-1, 3, 0, 0)])
    assert max(errors) < EXACT
    decodes = [Entry(2, 1, 5, 5, at=2), Entry(-1, 1, 0, 0), Entry(0, 1, 3, 3, at=90)]
    chunks = [
        Entry(1, 97, 4, 4, at=33, saves={31: 8, 95: 9}),
        Entry(-1, 0, 0, 0),
        Entry(3, 20, 7, 0),
        Entry(-1, 4, 0, 0),
        Entry(-1, 0, 0, 0),
    ]
    for absent in (0, 5):
        kept = it.state.recurrence.clone(), it.state.conv.clone()
        _, errors = it.run(net, decodes, chunks, absent=absent)
        assert max(errors) < EXACT
        assert it.state.recurrence[0].isnan().all()
        assert it.state.conv[0].isnan().all()
        it.state.recurrence.copy_(kept[0])
        it.state.conv.copy_(kept[1])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_states_may_be_bfloat16(kept: torch.dtype) -> None:
    it = World(HEADS, [80], torch.float32, CPU, kept=kept)
    net = TorchKernels().delta_net(it.weights)
    _, first = it.run(net, [], [Entry(0, 70, slot=3, source=0)])
    _, rest = it.run(net, [Entry(0, 1, slot=3, source=3, at=70)])
    assert max(first + rest) < (EXACT if kept == torch.float32 else 2e-2)
    assert it.state.recurrence.dtype == kept


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
        it = world(1)
        it.weights.conv, it.weights.norm = layer.conv1d.weight.squeeze(1), layer.norm.weight
        it.weights.a_log, it.weights.dt_bias = layer.A_log, layer.dt_bias
        net = TorchKernels().delta_net(it.weights)
        batch, _ = it.batch([], [Entry(-1, 100, slot=2, source=0)])
        out = layer.out_proj(net(qkv, z, b, a, it.state, batch))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
