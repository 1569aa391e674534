"""The demo model's tower for the trainer: Qwen3-VL's, with the names of its parameters, and the files around it.

This is not the engine's tower. A batch has images of one size.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from bench.demo_model import network as net
from bench.demo_model.chat_format import CHAT_TEMPLATE, IMAGE_TOKEN

PREFIX = "model.visual."  # of the names of tensors
_TEXT = "model.language_model."
_UNUSED_BYTE = "\u00c0"  # as the vocabulary writes the byte 0xC0
SECTIONS = (12, 10, 10)  # frequencies of the decoder's heads that belong to time, rows and columns
MIN_PIXELS, MAX_PIXELS = 13_500, 15_000  # of a resized image: 6 x 6 tokens, if it is a square
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The numbers of vision_config that make the parameters."""

    depth: int = 6
    hidden_size: int = 64
    intermediate_size: int = 256
    num_heads: int = 4
    patch_size: int = 10
    spatial_merge_size: int = 2
    temporal_patch_size: int = 1
    num_position_embeddings: int = 144
    out_hidden_size: int = 256
    deepstack_visual_indexes: tuple[int, ...] = (2, 3, 4, 5)

    @property
    def unit(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.spatial_merge_size


class LayerNorm(nn.LayerNorm):
    """Subtracts the mean, too."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=_EPS)


class PatchEmbedding(nn.Module):
    """Multiplies each patch with a matrix."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * shape.patch_size**2, shape.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        return torch.as_tensor(self.proj(patches))


class Attention(nn.Module):
    """All patches of an image attend to each other."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [images, patches, hidden], table: see `net.rotate`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(net.rotate(q, table), net.rotate(k, table), v)
        return torch.as_tensor(self.proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two layers without a gate."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(inputs, inner)
        self.linear_fc2 = nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh")))


class Block(nn.Module):
    """Attention and MLP, each around a residual."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = LayerNorm(shape.hidden_size)
        self.norm2 = LayerNorm(shape.hidden_size)
        self.attn = Attention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + torch.as_tensor(self.attn(self.norm1(x), table))
        return x + torch.as_tensor(self.mlp(self.norm2(x)))


class Merger(nn.Module):
    """Makes one embedding of the patches of a token. norm_merged: whether the norm is over all of them together."""

    def __init__(self, shape: TowerShape, norm_merged: bool) -> None:
        super().__init__()
        self.width = shape.hidden_size * shape.spatial_merge_size**2
        self.norm_merged = norm_merged
        self.norm = LayerNorm(self.width if norm_merged else shape.hidden_size)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, shape.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [images, patches, hidden] -> [images, tokens, hidden of the decoder]."""
        merged = (len(x), -1, self.width)
        x = self.norm(x.reshape(merged)) if self.norm_merged else self.norm(x).reshape(merged)
        return torch.as_tensor(self.linear_fc2(F.gelu(self.linear_fc1(x))))


class Tower(nn.Module):
    """Patches of images become embeddings of tokens, and what is added after the decoder's first layers."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, norm_merged=False)
        deep = shape.deepstack_visual_indexes
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, norm_merged=True) for _ in deep)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight"))
                spread = parameter.shape[1] ** -0.5 if "embed" not in name else 0.05
                nn.init.normal_(parameter, std=spread / ((2 * shape.depth) ** 0.5 if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, patches: Tensor, rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
        """patches [images, patches, 3 * patch * patch], ordered by token. rows, columns: of tokens."""
        places = self._places(rows, columns, patches.device)
        table = self._rope(places)
        x = self.patch_embed(patches) + self._positions(places)
        deep: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, table)
            if i in self.shape.deepstack_visual_indexes:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return self.merger(x), deep

    def _places(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return row and column of each patch, and rows and columns of the image in patches, [patches, 4]."""
        merge = self.shape.spatial_merge_size
        height, width = rows * merge, columns * merge
        grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        split = [one.reshape(rows, merge, columns, merge).transpose(1, 2).flatten() for one in grid]
        sizes = [torch.full_like(split[0], size) for size in (height, width)]
        return torch.stack((*split, *sizes), dim=1).to(device)

    def _positions(self, places: Tensor) -> Tensor:
        """Interpolate the table of positions, [patches, hidden]."""
        side = math.isqrt(self.shape.num_position_embeddings)
        at = places[:, :2].float() * (side - 1) / (places[:, 2:] - 1).clamp(min=1)
        low = at.floor().long()
        high, part = (low + 1).clamp(max=side - 1), at - low
        total = torch.zeros(len(places), self.shape.hidden_size, device=places.device)
        for row, of_row in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
            for column, of_column in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
                total = total + self.pos_embed(row * side + column) * (of_row * of_column)[:, None]
        return total

    def _rope(self, places: Tensor) -> Tensor:
        """Return cos and sin of the angles of rows, then of columns, [2, 1, 1, patches, head_dim / 2]."""
        size = self.shape.hidden_size // self.shape.num_heads // 2
        own = 10_000.0 ** -(torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size)
        angles = torch.cat([places[:, i : i + 1] * own for i in range(2)], dim=1)
        return torch.stack((angles.cos(), angles.sin()))[:, None, None]


def grid_of(width: int, height: int, shape: TowerShape) -> tuple[int, int]:
    """Return rows and columns of the tokens of an image, as Qwen's processors choose them."""
    unit = shape.unit
    rows, columns = round(height / unit), round(width / unit)
    pixels = rows * columns * unit**2
    if pixels > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        return max(1, math.floor(height / shrink / unit)), max(1, math.floor(width / shrink / unit))
    if pixels < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        return math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows, columns


def patches_of(image: Image.Image, shape: TowerShape) -> tuple[NDArray[np.uint8], int, int]:
    """Resize an image. Return its patches [patches, 3 * patch * patch], uint8, and the rows and columns of tokens."""
    rows, columns = grid_of(*image.size, shape)
    resized = image.convert("RGB").resize((columns * shape.unit, rows * shape.unit), Image.Resampling.BICUBIC)
    patch, merge = shape.patch_size, shape.spatial_merge_size
    parts = np.asarray(resized).reshape(rows, merge, patch, columns, merge, patch, 3)
    return parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * patch**2), rows, columns


def inputs_of(patches: Tensor) -> Tensor:
    """Scale numbers from 0 to 255 to those from -1 to 1."""
    return patches.float() * (2 / 255) - 1


def save(tower: Tower, folder: Path) -> None:
    """Make the checkpoint in `folder` one of Qwen3-VL with this tower, in bfloat16. The decoder keeps its bits."""
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(str(path)).items():
        if not name.startswith(PREFIX):
            is_plain = name.startswith("model.") and not name.startswith(_TEXT)
            tensors[_TEXT + name.removeprefix("model.") if is_plain else name] = value
    patch = tower.shape.patch_size
    for name, parameter in tower.named_parameters():
        made = parameter.detach().bfloat16().cpu()
        if name == "patch_embed.proj.weight":
            made = made.view(-1, 3, tower.shape.temporal_patch_size, patch, patch)
        tensors[f"{PREFIX}{name}"] = made.contiguous()
    save_file(tensors, str(path), metadata={"format": "pt"})
    token_id = _add_image_token(folder)
    _write(folder / "config.json", _config(_read(folder / "config.json"), tower.shape, token_id))
    _write(folder / "preprocessor_config.json", _processor(tower.shape))


def _add_image_token(folder: Path) -> int:
    """Add the token to the tokenizer's files, and the chat template that writes it. Return its id.

    It takes the id of the byte 0xC0, which UTF-8 never has. So the vocabulary does not grow.
    """
    tokenizer = _read(folder / "tokenizer.json")
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    if _UNUSED_BYTE in vocab:
        token_id = vocab[_UNUSED_BYTE]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": IMAGE_TOKEN, **flags, "special": True})
        tokenizer["added_tokens"].sort(key=lambda token: token["id"])
        tokenizer["model"]["vocab"] = {IMAGE_TOKEN if t == _UNUSED_BYTE else t: i for t, i in vocab.items()}
        _write(folder / "tokenizer.json", tokenizer)
    token_id = int(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(IMAGE_TOKEN).ids[0])
    config = _read(folder / "tokenizer_config.json")
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config["added_tokens_decoder"][str(token_id)] = {"content": IMAGE_TOKEN, **flags, "special": True}
    _write(folder / "tokenizer_config.json", config | {"chat_template": CHAT_TEMPLATE})
    return token_id


def _config(old: dict[str, Any], shape: TowerShape, token_id: int) -> dict[str, Any]:
    """Return config.json of the model with the tower."""
    text = old.get("text_config", old)
    ends = {key: text.pop(key) for key in ("eos_token_id", "bos_token_id", "pad_token_id") if key in text}
    ends = ends or {key: old[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id")}
    rope = {"rope_type": "default", "rope_theta": text.get("rope_theta", 10_000.0)}
    left_out = ("architectures", "rope_scaling", "torch_dtype", "rope_theta")
    text = {key: value for key, value in text.items() if key not in left_out} | {
        "model_type": "qwen3_vl_text",
        "rope_parameters": rope | {"mrope_section": list(SECTIONS), "mrope_interleaved": True},
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        **ends,
        "image_token_id": token_id,
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_vl",
            **asdict(shape),
            "in_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def _processor(shape: TowerShape) -> dict[str, Any]:
    """Return preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": shape.patch_size,
        "temporal_patch_size": shape.temporal_patch_size,
        "merge_size": shape.spatial_merge_size,
    }


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> Tower:
    """Read the tower that `save` wrote, in float32."""
    config = _read(folder / "config.json")["vision_config"]
    deep = tuple(config["deepstack_visual_indexes"])
    numbers = {name: config[name] for name in asdict(TowerShape())} | {"deepstack_visual_indexes": deep}
    tower = Tower(TowerShape(**numbers))
    weights = load_file(str(folder / "model.safetensors"))
    own = {n.removeprefix(PREFIX): w.float() for n, w in weights.items() if n.startswith(PREFIX)}
    own["patch_embed.proj.weight"] = own["patch_embed.proj.weight"].flatten(1)
    tower.load_state_dict(own)
    return tower.eval()
