"""gpt-oss: every other layer slides, each head has a sink, everything has a bias; experts of clamped gates."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.kernels.experts.routing.router import Router
from aengine.kernels.experts.rule import GateClamp
from aengine.model.families.experts import expert_count, expert_width
from aengine.model.families.parts import attention, layer_count, layers_of
from aengine.model.families.windows import layer_types, sliding_window
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec

DEFAULTS: dict[str, object] = {"sliding_window": 128, "rms_norm_eps": 1e-5}


def layers(fields: Fields) -> list[LayerSpec]:
    bias = fields.flag("attention_bias", default=True)
    heads = attention(fields, head_dim=64, qkv_bias=bias, out_bias=bias, theta=150_000.0)
    top_k = "num_experts_per_tok" if fields.present("num_experts_per_tok") else "experts_per_token"
    count = expert_count(fields)
    experts = ExpertsSpec(
        count=count,
        inner=expert_width(fields, "intermediate_size"),
        router=Router(top_k=fields.integer(top_k, 1, count, min(4, count)), scoring="softmax_of_chosen"),
        clamp=GateClamp(
            alpha=fields.number("swiglu_alpha", 0, 1e3, 1.702), limit=fields.number("swiglu_limit", 1e-3, 1e6, 7.0)
        ),
        biases=True,
        turned=True,
        router_name="router",
    )
    slides = (
        layer_types(fields)
        if fields.present("layer_types")
        else [layer % 2 == 0 for layer in range(layer_count(fields))]
    )
    window = sliding_window(fields)
    return layers_of(fields, replace(heads, sinks=True), experts, [window if slide else None for slide in slides])
