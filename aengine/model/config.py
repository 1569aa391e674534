"""What config.json says, checked and brought into one form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from aengine.cache.kv import KVShape
from aengine.errors import UnsupportedModelError
from aengine.model.architectures import ARCHITECTURES, Architecture
from aengine.model.fields import Fields, read_json_object, shown
from aengine.model.rope import RopeConfig, read_rope

# Far above any real model, far below what would overflow a size.
_MAX_VOCAB = 2**21  # eight times the largest that there is; grammars take 2 us an id before weights are looked at
_MAX_WIDTH = 2**20
_MAX_LAYERS = 4096
_MAX_HEADS = 2**14
_MAX_POSITIONS = 2**26

# Names that mean x * sigmoid(x).
_SILU = ("silu", "swish")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # positions it may be used for, what rope scaling adds included
    tie_word_embeddings: bool
    attention_bias: bool  # of q, k and v
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]  # [num_layers]: which layers use `sliding_window`
    dtype: str  # the checkpoint's: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def window(self, layer: int) -> int | None:
        """How many positions, its own included, a query of this layer sees; None: all before it."""
        return self.sliding_window if self.sliding_layers[layer] else None

    def kv_shape(self, page_size: int, dtype: torch.dtype) -> KVShape:
        """What pages of so many tokens hold for this model."""
        return KVShape(self.num_layers, page_size, self.num_kv_heads, self.head_dim, dtype)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json, in its present or its older spelling.

        Raises `UnsupportedModelError` for what this engine would compute wrongly, by name, and
        `CheckpointError`, naming the key, for values that no model has.
        """
        path = folder / "config.json"
        fields = Fields(read_json_object(path), str(path))
        name, kind = _architecture(fields)
        _refuse_unsupported(fields)
        hidden = fields.integer("hidden_size", 1, _MAX_WIDTH)
        layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
        heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
        # Old Llama files name no KV heads; then there are as many as heads.
        kv_heads = fields.integer("num_key_value_heads", 1, heads, heads if kind.window == "none" else None)
        if heads % kv_heads:
            raise fields.fail("num_attention_heads", f"({heads}) is no multiple of num_key_value_heads ({kv_heads})")
        head_dim = fields.integer("head_dim", 2, _MAX_WIDTH, kind.default_head_dim or max(hidden // heads, 1))
        if head_dim % 2:
            raise fields.fail("head_dim", f"must be even to be rotated, is {head_dim}")
        if heads * head_dim > _MAX_WIDTH:
            raise fields.fail("head_dim", f"times num_attention_heads is {heads * head_dim}, more than {_MAX_WIDTH}")
        vocab = fields.integer("vocab_size", 1, _MAX_VOCAB)
        positions = fields.integer("max_position_embeddings", 1, _MAX_POSITIONS)
        rope, positions = read_rope(fields, positions, _MAX_POSITIONS)
        window, sliding_layers = _windows(fields, kind, layers)
        bias = fields.flag("attention_bias", default=False)
        bos = fields.ids("bos_token_id", vocab)
        return cls(
            architecture=name,
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.integer("intermediate_size", 1, _MAX_WIDTH),
            rms_norm_eps=fields.number("rms_norm_eps", 0, 1, 1e-6),
            rope=rope,
            max_position_embeddings=positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            attention_bias=kind.qkv_bias == "always" or (kind.qkv_bias == "config" and bias),
            o_bias=kind.o_bias == "config" and bias,
            mlp_bias=kind.mlp_bias == "config" and fields.flag("mlp_bias", default=False),
            qk_norm=kind.qk_norm,
            sliding_window=window,
            sliding_layers=sliding_layers,
            dtype=_dtype(fields),
            eos_token_ids=fields.ids("eos_token_id", vocab),
            bos_token_id=bos[0] if bos else None,
        )


def _architecture(fields: Fields) -> tuple[str, Architecture]:
    names = fields.strings("architectures") if fields.present("architectures") else []
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    what = f"architecture {shown(names)} is not supported" if names else "architectures is missing"
    raise UnsupportedModelError(f"{fields.source}: {what}; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(fields: Fields) -> None:
    """Settings that would change the result and that the decoder does not implement."""
    activation = fields.text("hidden_act", "silu")
    if activation not in _SILU:
        raise UnsupportedModelError(f"{fields.source}: hidden_act {shown(activation)} is not supported, only silu")
    for key in ("quantization_config", "compression_config"):
        if fields.present(key):
            raise UnsupportedModelError(f"{fields.source}: {key} is set; quantized checkpoints are not supported")
    if not fields.flag("is_causal", default=True):
        raise UnsupportedModelError(f"{fields.source}: is_causal is false; bidirectional models are not supported")
    if fields.number("partial_rotary_factor", 0, 1, 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.source}: partial_rotary_factor other than 1 is not supported")


def _windows(fields: Fields, kind: Architecture, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window and the layers that use it."""
    nowhere = (False,) * layers
    if kind.window == "none":
        return None, nowhere
    in_use = kind.window == "all layers" or fields.flag("use_sliding_window", default=False)
    window = _window(fields) if in_use else None
    if kind.window == "all layers":
        use = (window is not None,) * layers
        if fields.present("layer_types") and _layer_types(fields, layers) != use:
            raise UnsupportedModelError(
                f"{fields.source}: layer_types that differ from sliding_window are not supported"
            )
    elif fields.present("layer_types"):
        use = _layer_types(fields, layers)
        if any(use) and window is None:
            raise fields.fail("layer_types", "asks for sliding attention while no sliding_window is in use")
    elif window is not None:
        first = fields.integer("max_window_layers", 0, 2**31, 28)
        use = tuple(layer >= first for layer in range(layers))
    else:
        use = nowhere
    return window, use


def _window(fields: Fields) -> int | None:
    # A file without the key has always meant 4096; null means no window.
    if fields.named("sliding_window") and not fields.present("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, 2**31, 4096)


def _layer_types(fields: Fields, layers: int) -> tuple[bool, ...]:
    types = fields.strings("layer_types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{fields.source}: layer type {shown(kind)} is not supported")
    if len(types) != layers:
        raise fields.fail("layer_types", f"names {len(types)} layers of {layers}")
    return tuple(kind == "sliding_attention" for kind in types)


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.present("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(f"{fields.source}: {key} {shown(name)} is not supported")
    return name
