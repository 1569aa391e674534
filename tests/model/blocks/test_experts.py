"""A mixture of experts has the norms and the scale of its layer, as an MLP has."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.experts import MixtureOfExperts
from aengine.model.blocks.mlp import MLP
from aengine.model.groups import Group
from aengine.model.parameters import Parameters
from aengine.model.rope import PositionTables
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import ExpertsSpec, MLPSpec
from aengine.model.spec.layer import LayerNorms, LayerSpec, NormSpec

HIDDEN, INNER, TOKENS = 16, 24, 5
NO_NORMS = LayerNorms(None, None, None, None)
CPU = torch.device("cpu")
ONE = ExpertsSpec(count=1, inner=INNER, router=Router(top_k=1, renormalise=True))  # its weight is always 1


class FiveTokens:
    """The part of a step that experts read."""

    class kv:
        page_size = 1

    def slots(self, tokens: int) -> Tensor:
        return torch.arange(1, tokens + 1)


def build_context() -> BuildContext:
    make = Parameters(TorchKernels(), torch.float32, CPU)
    return BuildContext(make, HIDDEN, 1e-6, PositionTables(8, CPU), TorchAttention())


def fill(groups: list[Group]) -> None:
    """Fill all tensors with random numbers that follow from their names. An expert's names are those of an MLP."""
    for group in groups:
        for name, place in group.open(list(group.entries)).items():
            numbers = torch.Generator().manual_seed(zlib.crc32(name.replace("experts.0.", "").encode()))
            place.copy_(torch.randn(place.shape, generator=numbers) * 0.5)
        group.close()


@pytest.mark.parametrize(
    "norms",
    [
        LayerNorms(None, None, NormSpec("before", 1e-6), None),
        LayerNorms(None, None, None, NormSpec("after", 1e-6)),
        LayerNorms(None, None, NormSpec("before", 1e-3, 1.0), NormSpec("after", 1e-5)),
        NO_NORMS,
    ],
    ids=["before", "after", "both", "none"],
)
@pytest.mark.parametrize("residual_scale", [1.0, 0.5])
def test_one_expert_is_an_mlp_of_the_same_layer(norms: LayerNorms, residual_scale: float) -> None:
    attention, mlp = AttentionSpec(heads=1, kv_heads=1, head_dim=HIDDEN), MLPSpec(inner=INNER)
    x, step, results = torch.randn(TOKENS, HIDDEN), FiveTokens(), []
    for spec, block in ((mlp, MLP), (ONE, MixtureOfExperts)):
        layer = LayerSpec(attention=attention, ffn=spec, norms=norms, residual_scale=residual_scale)
        context = build_context()
        made: Any = block(context, "layer", layer, spec)  # type: ignore[arg-type]
        names = {
            name
            for group in context.make.groups
            for name in group.entries
            if name in ("layer.before.weight", "layer.after.weight")
        }
        assert len(names) == (norms.before_ffn is not None) + (norms.after_ffn is not None)
        fill(context.make.groups)
        results.append(made(x.clone(), step))
    torch.testing.assert_close(results[1], results[0])


def test_a_shared_expert_reads_what_the_others_read_if_no_norm_comes_before() -> None:
    """Neither may read x after the other has added its result."""
    shared = ExpertsSpec(count=1, inner=INNER, router=ONE.router, shared=MLPSpec(inner=INNER))
    layer = LayerSpec(attention=AttentionSpec(heads=1, kv_heads=1, head_dim=HIDDEN), ffn=shared, norms=NO_NORMS)
    x, context, step = torch.randn(TOKENS, HIDDEN), build_context(), FiveTokens()
    block: Any = MixtureOfExperts(context, "layer", layer, shared)
    fill(context.make.groups)
    both = block(x.clone(), step)
    block._shared, parts = None, [block._shared(x)]
    parts.append(block(x.clone(), step) - x)
    torch.testing.assert_close(both, x + parts[0] + parts[1])
