"""Reads and checks config.json, in its older and its newer forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from aengine.cache.kv import KVLayer, KVShape
from aengine.cache.states import StateShape
from aengine.errors import ConfigError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.e2m1 import E2m1Weight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.model.architecture import Head, find_architecture, label_count, read_dtype, refuse_unsupported
from aengine.model.checkpoint.foreign import refuse_mlx
from aengine.model.checkpoint.weights import float_linears, has_head, stores_module
from aengine.model.families import FAMILIES, ignored_prefixes
from aengine.model.families.heads import DFlashSpec, Eagle3Spec
from aengine.model.families.mtp import MTPSpec, numbered_prefixes
from aengine.model.families.parts import hidden_size, norm_eps, unused_projections
from aengine.model.families.wrappers import LANGUAGE_MODEL, OTHER_NAMES, Wrapper, text_model, ties_by_default
from aengine.model.fields import Fields, read_json_object
from aengine.model.images.read import read_image_spec
from aengine.model.images.spec import ImageSpec
from aengine.model.lora.room import LoraRoom
from aengine.model.quant.base import QuantConfig
from aengine.model.quant.config import QUANTIZATION_KEYS, read_quantization
from aengine.model.rope import MAX_POSITIONS
from aengine.model.spec.attention import AttentionSpec, LatentSpec
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.layer import LayerSpec
from aengine.model.spec.recurrent import RecurrentSpec


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
    ignored_prefixes: tuple[str, ...] = ()  # of names of tensors that the decoder's layers do not use
    mtp: MTPSpec | None = None  # the layer that drafts tokens, if the files have one
    lacks_mtp: bool = False  # whether config.json names such a layer, but the files have none
    drafting: bool = False  # whether that layer is loaded, too
    # The draft head of another folder, or a draft model, if it is loaded, too.
    added_head: Eagle3Spec | DFlashSpec | DraftModel | None = None
    images: ImageSpec | None = None  # how the model takes images
    no_images: str = "it reads text only"  # why it takes none, if `images` is None
    sees: bool = False  # whether the tower for images is loaded, too
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
    def has_4_bits(self) -> bool:
        """Whether matrices may have 4 bits, integers or floats. A format that stores only experts does not count."""
        formats = () if self.quantized is None else self.quantized.formats
        classes = [form.weight_class for _, form in formats if not form.of_experts]
        return any(issubclass(one, Int4Weight | E2m1Weight) for one in classes)

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
        if not self.has_4_bits:
            raise ConfigError("unpacked_copies: the checkpoint has no matrices of 4 bits outside experts; leave it out")
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
        layers = (*self.layers, *(one.layer for one in self._drafting))
        for layer in layers:
            if what := layer.indivisible(ranks):
                fitting = [str(fewer) for fewer in (1, 2, 4) if not any(one.indivisible(fewer) for one in layers)]
                raise ConfigError(
                    f"tensor_parallel_size: {what} cannot be divided evenly among {ranks} ranks; use "
                    f"{' or '.join(fitting)}"
                )
        return msgspec.structs.replace(self, ranks=ranks)

    def with_lora(self, lora: LoraRoom | None) -> ModelConfig:
        """Return the same model with memory for adapters."""
        return msgspec.structs.replace(self, lora=lora)

    def with_drafting(self) -> ModelConfig:
        """Return the same model with its draft head. Raises `ConfigError` if the checkpoint has none."""
        if self.mtp is None:
            raise ConfigError(f"drafting: {self.no_drafting}; leave it out")
        return msgspec.structs.replace(self, drafting=True).spread_over(self.ranks)

    def with_head(self, head: Eagle3Spec | DFlashSpec | DraftModel) -> ModelConfig:
        """Return the same model with a draft head of another folder, instead of its own."""
        return msgspec.structs.replace(self, drafting=False, added_head=head)

    def with_images(self) -> ModelConfig:
        """Return the same model with its tower for images. Raises `ConfigError` if it has none."""
        if self.images is None:
            raise ConfigError(f"images: the model takes none: {self.no_images}; leave it out")
        return msgspec.structs.replace(self, sees=True)

    @property
    def tower(self) -> ImageSpec | None:
        """How the model takes images, if its tower is loaded."""
        return self.images if self.sees else None

    @property
    def shifts_positions(self) -> bool:
        """Whether tokens after an image may have other positions than their indices."""
        return self.tower is not None and self.tower.grid_rope is not None

    @property
    def no_drafting(self) -> str:
        """Why the checkpoint has no draft head. Empty if it has one."""
        if self.mtp is not None:
            return ""
        return (
            "config.json names an MTP layer, but the weights have no tensors of it"
            if self.lacks_mtp
            else "the checkpoint has no MTP layer"
        )

    @property
    def _drafting(self) -> tuple[MTPSpec, ...]:
        """The layers that are loaded to draft tokens."""
        return (self.mtp,) if self.drafting and self.mtp is not None else ()

    @property
    def unread_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of tensors that are not read."""
        read = {one.prefix for one in self._drafting}
        unread = [prefix for prefix in self.ignored_prefixes if prefix not in read]
        if (tower := self.tower) is not None:
            modules = tuple(f"{name}." for name in tower.modules)
            unread = [*(prefix for prefix in unread if not prefix.startswith(modules)), *tower.unread]
        return (*unread, *(prefix for one in self._drafting for prefix in one.unread))

    @property
    def parameters(self) -> int:
        """The number of weights, without those of a draft head."""
        hidden = self.hidden_size
        ends = self.end_parameters + self.second_embedding + self.ends.norm.parameters(hidden)
        return ends + sum(layer.parameters(hidden) for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """The number of weights that one token uses."""
        hidden = self.hidden_size
        ends = self.end_parameters + self.ends.norm.parameters(hidden)
        return ends + sum(layer.active_parameters(hidden) for layer in self.layers)

    @property
    def end_parameters(self) -> int:
        """The number of weights of the embedding, the output matrix, the head, and a second embedding's projection."""
        hidden, inputs = self.hidden_size, self.ends.layer_inputs
        vocabulary = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        more = 0 if inputs is None else inputs.parameters(hidden, len(self.layers))
        more += self.vocab_size * self.ends.logit_bias
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
        return [layer.attending for layer in self.layers if layer.attending is not None]

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
    def recurrent(self) -> list[RecurrentSpec]:
        """The recurrent parts of all layers that have one, in order. All are of one kind."""
        return [layer.recurrent for layer in self.layers if layer.recurrent is not None]

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Estimate the bytes of all weights on each rank, with adapters. dtype: of floats.

        If drafts read an output matrix of 16 bits, its copy in FP8 counts, which only GPUs without FP8 do not make.
        """
        quantized = self.quantized
        inner = 8 if self.to_fp8 else 8 * dtype.itemsize if quantized is None else quantized.bits
        floats = self.end_parameters + self.second_embedding
        attending = (*self.attending, *(one.attention for one in self._drafting))
        floats += sum(one.absorbed for one in attending if isinstance(one, LatentSpec))
        kept = floats * dtype.itemsize
        if self.unpacked_copies:
            every: tuple[LayerSpec | MTPSpec, ...] = (*self.layers, *self._drafting)
            linears = (linear for layer in every for linear in layer.linears(self.hidden_size))
            kept += sum(n * k for n, k in linears) * dtype.itemsize
        if dtype.itemsize == 2 and self._drafts_read_output:
            kept += self.vocab_size * self.hidden_size
        if self.lora is not None:
            kept += self.lora.numbers * (self.lora.places + 1) * dtype.itemsize
        parameters = self.parameters + sum(one.parameters(self.hidden_size) for one in self._drafting)
        added = self.added_head
        head = 0 if added is None else added.weight_bytes(dtype, self.ranks)
        if self.tower is not None:
            head += self.tower.tower.weights * dtype.itemsize
        return (kept + (parameters - floats) * inner // 8) // self.ranks + head

    @property
    def _drafts_read_output(self) -> bool:
        """Whether drafts are made with the model's output matrix: a head has none, and a draft model has its own."""
        head = self.added_head
        return self.drafting if head is None else not isinstance(head, DraftModel) and not head.has_head

    def kv_shape(self, page_size: int, dtype: torch.dtype) -> KVShape:
        """Return the shape of a page on each rank, with the layers of a draft head. page_size: in tokens."""
        layers = tuple(paging.kv_layer(self.ranks) for paging in self.paging)
        return KVShape((*layers, *self.draft_kv_layers), page_size, dtype)

    @property
    def draft_kv_layers(self) -> tuple[KVLayer, ...]:
        """What a draft head keeps of a token on each rank. These layers follow the others in the KV pool."""
        own = tuple(one.attention.kv_layer(self.ranks) for one in self._drafting)
        return own if self.added_head is None else self.added_head.kv_layers(self.ranks)

    def state_shape(self, dtype: torch.dtype, conv_dtype: torch.dtype) -> StateShape | None:
        """Return the shape of a slot of states on each rank, or None if no layer is recurrent.

        dtype: of the recurrent state. conv_dtype: of the convolution's state, which is the model's dtype.
        """
        recurrent = self.recurrent
        if not recurrent:
            return None
        channels, recurrence = recurrent[0].state_shape(self.ranks)
        return StateShape(len(recurrent), recurrent[0].conv, channels, recurrence, dtype, conv_dtype)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json in a folder.

        Raises `UnsupportedModelError` for settings that the engine does not support, and `CheckpointError` for values
        that are out of range. Both name the setting.
        """
        path = folder / "config.json"
        values = read_json_object(path)
        refuse_mlx(values, str(path))
        name, language_model, head, wrapper = find_architecture(Fields(values, str(path)))
        family = FAMILIES[language_model]
        images = _read_images(folder, values, wrapper)
        tied_by_default = wrapper is not None and ties_by_default(values, str(path))
        if wrapper is not None or ("text_config" in values and "hidden_size" not in values):
            values = text_model(values, str(path))
        fields = Fields(values, str(path)).with_defaults(family.defaults)
        layers = family.layers(fields)
        refuse_unsupported(fields, family, layers)
        vocab = fields.vocab_size
        ropes = [one.attending.rope for one in layers if one.attending is not None]
        reach = max(rope.reach if rope is not None else 0 for rope in ropes)
        stated = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        positions = min(max(fields.integer(family.positions, 1, MAX_POSITIONS, stated), reach), MAX_POSITIONS)
        bos = fields.ids("bos_token_id", vocab)
        quantization = _quantization(values)
        quantized = read_quantization(Fields(msgspec.json.decode(quantization), str(path)))
        if quantized is None and (beside := folder / "hf_quant_config.json").exists():
            quantization = _quantization({"quantization_config": read_json_object(beside)})
            quantized = read_quantization(Fields(msgspec.json.decode(quantization), str(beside)))
        mtp = None if family.mtp is None or head != "vocabulary" else family.mtp.spec(fields, layers)
        stored = None if mtp is None else stores_module(folder, mtp.projection)
        tie = family.tie if family.tie and fields.present(family.tie) else "tie_word_embeddings"
        tied = fields.flag(tie, default=bool(family.tie)) and not (tied_by_default and has_head(folder))
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
            labels=label_count(fields) if head == "classes" else 0,
            dtype=read_dtype(fields),
            eos_token_ids=fields.ids("eos_token_id", vocab),
            bos_token_id=bos[0] if bos else None,
            quantization=quantization,
            float_linears=tuple(filter(quantized.quantizes, sorted(float_linears(folder)))) if quantized else (),
            ignored_prefixes=(
                *ignored_prefixes(language_model),
                *numbered_prefixes(fields, len(layers)),
                *unused_projections(layers),
            ),
            mtp=None if stored is False else mtp,
            images=images if isinstance(images, ImageSpec) else None,
            no_images="" if isinstance(images, ImageSpec) else images,
            lacks_mtp=stored is False and family.mtp is not None and family.mtp.is_named(fields),
        )


class DraftModel(msgspec.Struct, frozen=True, kw_only=True, tag="draft"):
    """A smaller model that drafts tokens for a model with the same vocabulary. The methods are those of `HeadSpec`."""

    model: ModelConfig

    @property
    def attention(self) -> list[AttentionSpec | LatentSpec]:
        return self.model.attending

    def spread_over(self, ranks: int) -> int:
        return 1 if any(layer.indivisible(ranks) for layer in self.model.layers) else ranks

    def kv_layers(self, ranks: int) -> tuple[KVLayer, ...]:
        return tuple(attention.kv_layer(self.spread_over(ranks)) for attention in self.model.paging)

    def weight_bytes(self, dtype: torch.dtype, ranks: int) -> int:
        return self.model.spread_over(self.spread_over(ranks)).weight_bytes(dtype)


def _read_images(folder: Path, values: Mapping[str, object], wrapper: Wrapper | None) -> ImageSpec | str:
    """Return how a model takes images, or why it takes none. values: of config.json."""
    if wrapper is None or wrapper.images is None:
        return "it reads text only"
    found = read_image_spec(folder, values, wrapper.images)
    if isinstance(found, ImageSpec) and any(stores_module(folder, module) is False for module in found.modules):
        return f"the weights have no tensors of {' and '.join(found.modules)}"
    return found


def _quantization(values: Mapping[str, object]) -> str:
    """Return the quantization settings as JSON. Names of modules are changed to those of a plain language model."""
    kept = {key: values[key] for key in QUANTIZATION_KEYS if values.get(key) is not None}
    text = msgspec.json.encode(kept).decode()
    for outer, inner in (*LANGUAGE_MODEL.items(), *OTHER_NAMES.items()):
        for dot in (".", r"\\."):  # regular expressions may have a backslash before it, which JSON doubles
            text = text.replace(outer.replace(".", dot), inner.replace(".", dot))
    return text
