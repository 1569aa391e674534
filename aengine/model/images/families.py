"""The families of models that see: each turns the files of a checkpoint into an `ImageSpec`."""

from __future__ import annotations

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields
from aengine.model.images.read import (
    MAX_LAYERS,
    MAX_SIDE,
    MAX_WIDTH,
    ImageFiles,
    activation,
    grid_rope,
    heads,
    pixel_values,
    resample,
    side,
    theta,
    three_channels,
    token_id,
)
from aengine.model.images.resizing import AreaRule, BudgetRule, EdgeRule, FixedRule
from aengine.model.images.spec import ImageSpec, Mutual, Placeholders
from aengine.model.images.tower_specs import Gemma4Tower, PixtralTower, QwenTower, SiglipTower

_HALF = (0.5, 0.5, 0.5)
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_BILINEAR, _BICUBIC = 2, 3
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
_MAX_TOKENS = 2**16


def qwen3_5(files: ImageFiles) -> ImageSpec:
    part = _rope(files.text).number("partial_rotary_factor", 0, 1, 0.25)
    return _qwen(files, int(files.text.integer("head_dim", 2, MAX_WIDTH, 256) * part), (11, 11, 10))


def qwen3_vl(files: ImageFiles) -> ImageSpec:
    return _qwen(files, files.text.integer("head_dim", 2, MAX_WIDTH, 128), (24, 20, 20))


def _qwen(files: ImageFiles, rotated: int, sections: tuple[int, int, int]) -> ImageSpec:
    """rotated: dimensions of each head of the decoder. sections: see `GridRope`."""
    vision, images = files.vision, files.images
    three_channels(vision, "in_channels")
    layers, hidden = vision.integer("depth", 1, MAX_LAYERS), vision.integer("hidden_size", 4, MAX_WIDTH)
    patch, merge = side(vision, "patch_size", 16), vision.integer("spatial_merge_size", 1, 16, 2)
    frames = vision.integer("temporal_patch_size", 1, 16, 2)
    for key, own in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
        _same(images, key, own)
    entries = vision.integer("num_position_embeddings", 1, MAX_SIDE**2, 2304)
    deep = vision.list_of_integers("deepstack_visual_indexes") if vision.present("deepstack_visual_indexes") else []
    if any(not 0 <= layer < layers for layer in deep):
        raise vision.fail("deepstack_visual_indexes", f"must be layers from 0 to {layers - 1}")
    _same(vision, "out_hidden_size", files.hidden, 3584)
    token = token_id(files.config, "image_token_id")
    size = images.section("size") or Fields({}, images.source)
    smallest = images.integer("min_pixels", 1, 2**40, size.integer("shortest_edge", 1, 2**40, 56 * 56))
    largest = images.integer("max_pixels", 1, 2**40, size.integer("longest_edge", 1, 2**40, 28 * 28 * 1280))
    return ImageSpec(
        rule=AreaRule(patch * merge, smallest, max(largest, smallest, (patch * merge) ** 2)),
        resample=resample(images, _BICUBIC),
        patch=patch,
        merge=merge,
        pixels=pixel_values(images, *_CLIP),
        placeholders=Placeholders(marker=token, token=token),
        grid_rope=grid_rope(files.text, rotated, True, sections),
        tower=QwenTower(
            layers=layers,
            hidden=hidden,
            inner=vision.integer("intermediate_size", 1, MAX_WIDTH),
            heads=heads(vision, "num_heads", hidden),
            frames=frames,
            side=int(entries**0.5),
            theta=theta(vision, 10_000.0),
            activation=activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            out=files.hidden,
            deep=tuple(deep),
        ),
        modules=("visual",),
    )


def gemma3(files: ImageFiles) -> ImageSpec:
    vision, images = files.vision, files.images
    three_channels(vision, "num_channels")
    if images.flag("do_pan_and_scan", default=False):
        raise UnsupportedModelError(f"{images.source}: do_pan_and_scan is true; crops of images are not supported")
    hidden, patch = vision.integer("hidden_size", 4, MAX_WIDTH, 768), side(vision, "patch_size", 16)
    pixels = vision.integer("image_size", patch, MAX_SIDE, 224)
    size = images.section("size") or Fields({}, images.source)
    for key in ("height", "width"):
        _same(size, key, pixels)
    patches = pixels // patch
    tokens = int(files.config.integer("mm_tokens_per_image", 1, _MAX_TOKENS, 256) ** 0.5)
    if pixels % patch or patches % tokens:
        raise vision.fail("image_size", f"({pixels}) does not divide into {tokens} x {tokens} tokens of whole patches")
    begin, end = token_id(files.config, "boi_token_index"), token_id(files.config, "eoi_token_index")
    return ImageSpec(
        rule=FixedRule(pixels // tokens, tokens),
        resample=resample(images, _BILINEAR),
        patch=patch,
        merge=patches // tokens,
        pixels=pixel_values(images, _HALF, _HALF),
        placeholders=Placeholders(
            marker=begin,
            token=token_id(files.config, "image_token_index", "image_token_id"),
            before=("\n\n", begin),
            after=(end, "\n\n"),
        ),
        mutual="all",
        tower=SiglipTower(
            layers=vision.integer("num_hidden_layers", 1, MAX_LAYERS, 12),
            hidden=hidden,
            inner=vision.integer("intermediate_size", 1, MAX_WIDTH, 3072),
            heads=heads(vision, "num_attention_heads", hidden),
            side=patches,
            eps=vision.number("layer_norm_eps", 0, 1, 1e-6),
            activation=activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            out=files.hidden,
        ),
        modules=("vision_tower", "multi_modal_projector"),
        unread=("vision_tower.head.",),
    )


def gemma4(files: ImageFiles) -> ImageSpec:
    vision, images, config = files.vision, files.images, files.config
    hidden, patch = vision.integer("hidden_size", 4, MAX_WIDTH, 768), side(vision, "patch_size", 16)
    merge = vision.integer("pooling_kernel_size", 1, 16, 3)
    _same(images, "patch_size", patch, 16)
    _same(images, "pooling_kernel_size", merge, 3)
    tokens = images.integer("max_soft_tokens", 1, _MAX_TOKENS, 280)
    if tokens not in _SOFT_TOKENS:
        raise images.fail("max_soft_tokens", f"must be one of {_SOFT_TOKENS}, is {tokens}")
    count = vision.integer("num_attention_heads", 1, MAX_WIDTH, 12)
    kv_heads = vision.integer("num_key_value_heads", 1, count, 12)
    head_dim = vision.integer("head_dim", 4, MAX_WIDTH, 64)
    if head_dim % 4 or count % kv_heads:
        raise vision.fail("head_dim", f"({head_dim}) must be a multiple of 4, and KV heads must divide the heads")
    if vision.flag("attention_bias", default=False):
        raise UnsupportedModelError(f"{vision.source}: attention_bias is true, which is not supported")
    positions = vision.integer("position_embedding_size", 1, 2**20, 10_240)
    if positions < tokens * merge:
        raise vision.fail("position_embedding_size", f"({positions}) is less than {tokens * merge} patches of a side")
    seen = files.text.text("use_bidirectional_attention", "") == "vision"
    mutual: Mutual = "sliding" if seen else "none"
    return ImageSpec(
        rule=BudgetRule(patch * merge, patch, tokens),
        resample=resample(images, _BICUBIC),
        patch=patch,
        merge=merge,
        pixels=pixel_values(images.with_defaults({"do_normalize": False}), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        placeholders=Placeholders(
            marker=token_id(config, "image_token_id"),
            token=token_id(config, "image_token_id"),
            fill=files.text.integer("pad_token_id", 0, 2**31, 0),
            before=(token_id(config, "boi_token_id"),),
            after=(token_id(config, "eoi_token_id"),),
        ),
        mutual=mutual,
        tower=Gemma4Tower(
            layers=vision.integer("num_hidden_layers", 1, MAX_LAYERS, 16),
            hidden=hidden,
            inner=vision.integer("intermediate_size", 1, MAX_WIDTH, 3072),
            heads=count,
            kv_heads=kv_heads,
            head_dim=head_dim,
            positions=positions,
            theta=theta(vision, 100.0),
            eps=vision.number("rms_norm_eps", 0, 1, 1e-6),
            clipped=vision.flag("use_clipped_linears", default=False),
            standardised=vision.flag("standardize", default=False),
            out=files.hidden,
        ),
        modules=("vision_tower", "embed_vision"),
    )


def mistral3(files: ImageFiles) -> ImageSpec:
    vision, images, config = files.vision, files.images, files.config
    three_channels(vision, "num_channels")
    hidden, patch = vision.integer("hidden_size", 4, MAX_WIDTH, 1024), side(vision, "patch_size", 16)
    merge = config.integer("spatial_merge_size", 1, 16, 2)
    _same(files.processor, "spatial_merge_size", merge)
    if config.integer("vision_feature_layer", -MAX_LAYERS, MAX_LAYERS, -1) != -1:
        raise UnsupportedModelError(f"{config.source}: vision_feature_layer other than -1 is not supported")
    size = images.section("size") or Fields({}, images.source)
    token = token_id(config, "image_token_index", "image_token_id")
    return ImageSpec(
        rule=EdgeRule(patch * merge, size.integer("longest_edge", patch * merge, MAX_SIDE, 1024)),
        resample=resample(images, _BICUBIC),
        patch=patch,
        merge=merge,
        pixels=pixel_values(images, *_CLIP),
        placeholders=Placeholders(
            marker=token,
            token=token,
            row_end=files.processor.text("image_break_token", "[IMG_BREAK]"),
            last=files.processor.text("image_end_token", "[IMG_END]"),
        ),
        tower=PixtralTower(
            layers=vision.integer("num_hidden_layers", 1, MAX_LAYERS, 24),
            hidden=hidden,
            inner=vision.integer("intermediate_size", 1, MAX_WIDTH, 4096),
            heads=heads(vision, "num_attention_heads", hidden),
            theta=theta(vision, 10_000.0),
            activation=activation(vision, "hidden_act", "gelu"),
            projection_activation=activation(config, "projector_hidden_act", "gelu"),
            projection_bias=config.flag("multimodal_projector_bias", default=False),
            projection_eps=files.text.number("rms_norm_eps", 0, 1, 1e-6),
            out=files.hidden,
        ),
        modules=("vision_tower", "multi_modal_projector"),
    )


def _rope(text: Fields) -> Fields:
    return text.section("rope_parameters") or text.section("rope_scaling") or text


def _same(fields: Fields, key: str, value: int, default: int | None = None) -> None:
    """Raise `CheckpointError` if a file has another value than the tower under a key."""
    if fields.present(key) or default is not None:
        found = side(fields, key, default) if key == "patch_size" else fields.integer(key, 1, MAX_WIDTH, default)
        if found != value:
            raise fields.fail(key, f"is {found}, the tower's is {value}")
