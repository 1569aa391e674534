"""Reads and checks config.json, in its older and its newer forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch

from aengine.cache.kv import KVShape
from aengine.cache.states import StateShape
from aengine.errors import ConfigError, UnsupportedModelError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.int4 import Int4Weight
from aengine.model.checkpoint.foreign import refuse_mlx
from aengine.model.checkpoint.weights import float_linears, has_head
from aengine.model.families import FAMILIES, WRAPPERS, Family, ignored_prefixes
from aengine.model.families.parts import hidden_size, norm_eps
from aengine.model.families.wrappers import LANGUAGE_MODEL, Wrapper, text_model, ties_by_default
from aengine.model.fields import Fields, read_json_object, shown
from aengine.model.lora.room import LoraRoom
from aengine.model.quant.base import QuantConfig
from aengine.model.quant.config import METHODS, QUANTIZATION_KEYS, read_quantization
from aengine.model.rope import MAX_POSITIONS
from aengine.model.spec import AttentionSpec, DeltaSpec, EndsSpec, ExpertsSpec, LatentSpec, LayerSpec

# The output after the last layer: logits of the vocabulary, logits of classes, or nothing.
Head = Literal["vocabulary", "classes", "none"]
# By the end of a name in `architectures`.
_HEADS: dict[str, Head] = {"ForCausalLM": "vocabulary", "ForSequenceClassification": "classes", "Model": "none"}
_MAX_LABELS = 2**16


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a decoder, from config.json and the engine's knobs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float  # of norms within blocks; `NormSpec` has the eps of all other norms
    layers: tuple[LayerSpec, ...]
    ends: EndsSpec
    max_position_embeddings: int  # usable positions, including those that rope scaling adds
    tie_word_embeddings: bool  # also true if there is no output matrix
    head: Head = "vocabulary"
    labels: int = 0  # the number of classes, if the head scores classes
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: str = "{}"  # the settings of config.json, as JSON
    float_linears: tuple[str, ...] = ()  # modules that are floats in the files, although the settings include them
    to_fp8: bool = False  # whether matrices of floats become FP8 while they are loaded
    unpacked_copies: bool = False  # whether 4-bit matrices are also kept as floats
    ranks: int = 1  # the number of GPUs that the model is spread over
    ignored_prefixes: tuple[str, ...] = ()  # of names of tensors that are not used
    lora: LoraRoom | None = None  # the memory for adapters

    @property
    def quantized(self) -> QuantConfig | None:
        """The formats of the checkpoint's matrices, or None if all are floats."""
        quantized = read_quantization(Fields(msgspec.json.decode(self.quantization), "config.json"))
        return quantized and quantized.without(self.float_linears)

    @property
    def weight_classes(self) -> frozenset[type[QuantizedWeight]]:
        """The classes of the model's quantised weights."""
        formats = () if self.quantized is None else self.quantized.formats
        made = {Fp8Weight} if self.to_fp8 else set()
        return frozenset({form.weight_class for _, form in formats} | made)

    @property
    def int4(self) -> bool:
        """Whether there are matrices of 4-bit integers."""
        return Int4Weight in self.weight_classes

    def quantized_as(self, method: str) -> ModelConfig:
        """Return the same model in a format. FP8 is made from floats while they are loaded.

        Raises `ConfigError` if the checkpoint has another format, or if floats cannot become this one.
        """
        if (quantized := self.quantized) is not None:
            if quantized.method == method:
                return self
            raise ConfigError(f"quantization: {method} was asked for, the checkpoint has {quantized.method}; use auto")
        if method != "fp8":
            raise ConfigError(f"quantization: {method} was asked for, the checkpoint has floats; use auto or fp8")
        return msgspec.structs.replace(self, to_fp8=True)

    def with_unpacked_copies(self) -> ModelConfig:
        """Return the same model with copies of its 4-bit matrices in floats. Raises `ConfigError` if it has none."""
        if not self.int4:
            raise ConfigError("unpacked_copies: the checkpoint has no matrices of 4-bit integers; leave it out")
        return msgspec.structs.replace(self, unpacked_copies=True)

    def needs_long_rope(self, max_positions: int) -> bool:
        """Return whether a layer needs longrope's long factors for this many positions."""
        ropes = (attention.rope for attention in self.attending)
        return any(rope is not None and rope.needs_long_factors(max_positions) for rope in ropes)

    @property
    def near_positions(self) -> int:
        """The trained context in tokens if longer sequences use longrope's long factors, else 0."""
        ropes = (attention.rope for attention in self.attending)
        return min((rope.original_positions for rope in ropes if rope is not None and rope.short_factors), default=0)

    def spread_over(self, ranks: int) -> ModelConfig:
        """Return the same model, spread over ranks. Raises `ConfigError` if it cannot be divided evenly."""
        for layer in self.layers:
            if what := layer.indivisible(ranks):
                fitting = [str(fewer) for fewer in (1, 2, 4) if not any(one.indivisible(fewer) for one in self.layers)]
                raise ConfigError(
                    f"tensor_parallel_size: {what} cannot be divided evenly among {ranks} ranks; use "
                    f"{' or '.join(fitting)}"
                )
        return msgspec.structs.replace(self, ranks=ranks)

    def with_lora(self, lora: LoraRoom | None) -> ModelConfig:
        """Return the same model with memory for adapters."""
        return msgspec.structs.replace(self, lora=lora)

    @property
    def parameters(self) -> int:
        """The number of weights."""
        hidden = self.hidden_size
        tables = self.end_parameters + self.second_embedding
        return tables + hidden + sum(layer.parameters(hidden) for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """The number of weights that one token uses."""
        hidden = self.hidden_size
        return self.end_parameters + hidden + sum(layer.active_parameters(hidden) for layer in self.layers)

    @property
    def end_parameters(self) -> int:
        """The number of weights of the embedding, the output matrix, the head, and a second embedding's projection."""
        hidden, inputs = self.hidden_size, self.ends.layer_inputs
        vocabulary = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        more = 0 if inputs is None else inputs.parameters(hidden, len(self.layers))
        return (vocabulary + self.labels) * hidden + more

    @property
    def second_embedding(self) -> int:
        """The number of weights of a second embedding's table."""
        return 0 if self.ends.layer_inputs is None else self.ends.layer_inputs.table(len(self.layers))

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer that attends, as in `AttentionSpec`."""
        return [attention.window for attention in self.attending]

    @property
    def attending(self) -> list[AttentionSpec | LatentSpec]:
        """The attention of all layers that read keys and values from pages, in order."""
        return [layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaSpec)]

    @property
    def latents(self) -> bool:
        """Whether the layers attend to latents. If one does, all do."""
        return any(isinstance(attention, LatentSpec) for attention in self.attending)

    @property
    def paging(self) -> list[AttentionSpec | LatentSpec]:
        """The attention of all layers that store their own keys and values in pages, in order."""
        return [attention for attention in self.attending if attention.shares_kv_of is None]

    @property
    def sliding(self) -> tuple[int, ...]:
        """The indices within `paging` of layers with a window."""
        return tuple(i for i, attention in enumerate(self.paging) if attention.window is not None)

    @property
    def recurrent(self) -> list[DeltaSpec]:
        """The attention of all recurrent layers, in order."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, DeltaSpec)]

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Estimate the bytes of all weights on each rank, with adapters. dtype: of floats."""
        quantized = self.quantized
        inner = 8 if self.to_fp8 else 8 * dtype.itemsize if quantized is None else quantized.bits
        floats = self.end_parameters + self.second_embedding
        floats += sum(one.absorbed for one in self.attending if isinstance(one, LatentSpec))
        kept = floats * dtype.itemsize
        if self.unpacked_copies:
            linears = (linear for layer in self.layers for linear in layer.linears(self.hidden_size))
            kept += sum(n * k for n, k in linears) * dtype.itemsize
        if self.lora is not None:
            kept += self.lora.numbers * (self.lora.places + 1) * dtype.itemsize
        return (kept + (self.parameters - floats) * inner // 8) // self.ranks

    def kv_shape(self, page_size: int, dtype: torch.dtype) -> KVShape:
        """Return the shape of a page on each rank. page_size: in tokens."""
        return KVShape(tuple(paging.kv_layer(self.ranks) for paging in self.paging), page_size, dtype)

    def state_shape(self, dtype: torch.dtype, conv_dtype: torch.dtype) -> StateShape | None:
        """Return the shape of a slot of states on each rank, or None if no layer is recurrent.

        dtype: of the recurrent state. conv_dtype: of the convolution's state, which is the model's dtype.
        """
        recurrent = self.recurrent
        if not recurrent:
            return None
        delta, ranks = recurrent[0], self.ranks
        return StateShape(
            len(recurrent),
            delta.conv,
            delta.heads.channels // ranks,
            (delta.value_heads // ranks, delta.key_dim, delta.value_dim),
            dtype,
            conv_dtype,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json in a folder.

        Raises `UnsupportedModelError` for settings that the engine does not support, and `CheckpointError` for values
        that are out of range. Both name the setting.
        """
        path = folder / "config.json"
        values = read_json_object(path)
        refuse_mlx(values, str(path))
        name, language_model, head, wrapper = _architecture(Fields(values, str(path)))
        family = FAMILIES[language_model]
        tied_by_default = wrapper is not None and ties_by_default(values, str(path))
        if wrapper is not None or ("text_config" in values and "hidden_size" not in values):
            values = text_model(values, str(path))
        fields = Fields(values, str(path)).with_defaults(family.defaults)
        layers = family.layers(fields)
        _refuse_unsupported(fields, family, layers)
        vocab = fields.vocab_size
        ropes = [layer.attention.rope for layer in layers if not isinstance(layer.attention, DeltaSpec)]
        reach = max(rope.reach if rope is not None else 0 for rope in ropes)
        positions = min(max(fields.integer("max_position_embeddings", 1, MAX_POSITIONS), reach), MAX_POSITIONS)
        bos = fields.ids("bos_token_id", vocab)
        quantization = _quantization(values)
        quantized = read_quantization(Fields(msgspec.json.decode(quantization), str(path)))
        if quantized is None and (beside := folder / "hf_quant_config.json").exists():
            raise UnsupportedModelError(
                f"{beside}: ModelOpt's formats are not supported; supported are {', '.join(METHODS)}"
            )
        tied = fields.flag("tie_word_embeddings", default=False) and not (tied_by_default and has_head(folder))
        return cls(
            architecture=name,
            vocab_size=vocab,
            hidden_size=hidden_size(fields),
            rms_norm_eps=norm_eps(fields),
            layers=tuple(layers),
            ends=family.ends(fields),
            max_position_embeddings=positions,
            tie_word_embeddings=tied or head != "vocabulary",
            head=head,
            labels=_labels(fields) if head == "classes" else 0,
            dtype=_dtype(fields),
            eos_token_ids=fields.ids("eos_token_id", vocab),
            bos_token_id=bos[0] if bos else None,
            quantization=quantization,
            float_linears=tuple(filter(quantized.quantizes, sorted(float_linears(folder)))) if quantized else (),
            ignored_prefixes=(
                *ignored_prefixes(language_model),
                *_draft_layers(fields, len(layers)),
                *_unused_projections(layers),
            ),
        )


def _architecture(fields: Fields) -> tuple[str, str, Head, Wrapper | None]:
    """Return the architecture, its key in `FAMILIES`, its head, and its multimodal model (None: there is none)."""
    names = fields.strings("architectures") if fields.present("architectures") else []
    for name in names:
        if name in WRAPPERS:
            return name, WRAPPERS[name].family(fields), "vocabulary", WRAPPERS[name]
        for ending, head in _HEADS.items():
            family = f"{name.removesuffix(ending)}ForCausalLM"
            if name.endswith(ending) and family in FAMILIES:
                return name, family, head, None
    what = f"architecture {shown(names)} is not supported" if names else "architectures is missing"
    raise UnsupportedModelError(
        f"{fields.source}: {what}; supported are {', '.join(name.removesuffix('ForCausalLM') for name in FAMILIES)} "
        f"with ForCausalLM, Model or ForSequenceClassification at the end, and {', '.join(WRAPPERS)}"
    )


def _labels(fields: Fields) -> int:
    """Return the number of classes. transformers writes the names of the classes, or nothing if there are two."""
    if fields.present("num_labels"):
        return fields.integer("num_labels", 1, _MAX_LABELS)
    names = fields.section("id2label")
    if names is None:
        return 2
    if not 1 <= len(names.names()) <= _MAX_LABELS:
        raise fields.fail("id2label", f"must name 1 to {_MAX_LABELS} classes, names {len(names.names())}")
    return len(names.names())


def _refuse_unsupported(fields: Fields, family: Family, layers: Sequence[LayerSpec]) -> None:
    """Raise `UnsupportedModelError` if a setting changes the result and the decoder does not support it."""
    if not fields.flag("is_causal", default=True):
        raise UnsupportedModelError(f"{fields.source}: is_causal is false; bidirectional models are not supported")
    if fields.present("swiglu_limit") and not any(_clamps(layer) for layer in layers):
        raise UnsupportedModelError(f"{fields.source}: swiglu_limit is set; clamped gates are not supported here")
    by_layer = fields.section("per_layer_config")
    if by_layer is not None and by_layer.names() and not family.has_layer_settings:
        raise UnsupportedModelError(
            f"{fields.source}: per_layer_config is set; settings of single layers are not supported"
        )


def _clamps(layer: LayerSpec) -> bool:
    return isinstance(layer.ffn, ExpertsSpec) and layer.ffn.clamp is not None


def _draft_layers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the prefixes of layers after the last one. They draft tokens and are not used."""
    key = "num_mtp_layers" if fields.present("num_mtp_layers") else "num_nextn_predict_layers"
    drafts = fields.integer(key, 0, 64, 0)
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + drafts))


def _unused_projections(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return prefixes of K and V projections in layers that read other layers' K and V. Some files have them."""
    shares = (
        i
        for i, one in enumerate(layers)
        if isinstance(one.attention, AttentionSpec) and one.attention.shares_kv_of is not None
    )
    return tuple(f"model.layers.{i}.self_attn.{name}." for i in shares for name in ("k_proj", "v_proj", "k_norm"))


def _quantization(values: Mapping[str, object]) -> str:
    """Return the quantization settings as JSON. Names of modules are changed to those of a plain language model."""
    kept = {key: values[key] for key in QUANTIZATION_KEYS if values.get(key) is not None}
    text = msgspec.json.encode(kept).decode()
    for outer, inner in LANGUAGE_MODEL.items():
        text = text.replace(outer, inner)
    return text


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.present("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(f"{fields.source}: {key} {shown(name)} is not supported")
    return name
