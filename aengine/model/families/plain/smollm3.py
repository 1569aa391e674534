"""SmolLM3: Llama without a rotation in every fourth layer."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.model.families.parts import attention, layer_count, layers_of, mlp
from aengine.model.families.windows import windows_by_layer
from aengine.model.fields import Fields
from aengine.model.spec import AttentionSpec, LayerSpec

DEFAULTS: dict[str, object] = {"tie_word_embeddings": True, "num_key_value_heads": 4, "max_window_layers": 2**31}


def layers(fields: Fields) -> list[LayerSpec]:
    bias = fields.flag("attention_bias", default=False)
    rotated = attention(fields, qkv_bias=bias, out_bias=bias, theta=2_000_000.0)
    turns = rotated_layers(fields)

    def heads(layer: int) -> AttentionSpec:
        return rotated if turns[layer] else replace(rotated, rope=None)

    ffn = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    return layers_of(fields, heads, ffn, windows_by_layer(fields))


def rotated_layers(fields: Fields) -> list[bool]:
    """Which layers rotate: `no_rope_layers` has a 1 for those that do, whatever its name says."""
    count = layer_count(fields)
    if fields.present("no_rope_layers"):
        return [turns == 1 for turns in fields.integers("no_rope_layers", count, 0, 1)]
    interval = fields.integer("no_rope_layer_interval", 1, 2**31, 4)
    return [(layer + 1) % interval != 0 for layer in range(count)]
