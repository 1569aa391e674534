"""Random draft heads with files of their own, and what their layers compute, in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """The settings that heads of all kinds have, and the layout of the files."""

    target_hidden: int = 64
    target_vocab: int = 96
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 80
    layers: int = 1
    taps: tuple[int, ...] = (1, 2, 3)
    draft_vocab: int = 96
    eps: float = 1e-5
    theta: float = 5000.0
    bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    own_head: bool = False
    speculators: bool = False  # the layout of the package speculators
    prefix: str = ""  # of most tensors
    more: dict[str, object] = field(default_factory=dict)  # further keys of config.json
    unused: ClassVar[tuple[str, ...]] = ()  # tensors that only training reads

    def layer(self, i: int) -> str:
        return f"layers.{i}"

    def inputs(self, i: int) -> int:
        return self.hidden

    def norms(self) -> dict[str, int]:
        """The width of each norm, except for those of heads."""
        parts = ("input_layernorm", "post_attention_layernorm")
        return {f"{self.layer(i)}.{part}": self.hidden for i in range(self.layers) for part in parts}

    def tensors(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Further random tensors, by their names without prefix."""
        return {}

    def config(self, layer: dict[str, object]) -> dict[str, object]:
        """The values of config.json. layer: those of the layers."""
        raise NotImplementedError


def make_tensors(head: CommonSettings, seed: int = 0) -> dict[str, Tensor]:
    """Return the head's tensors in float32 by their names without prefix."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.25 * torch.randn(width, generator=generator)

    hidden, queries, keys = head.hidden, head.heads * head.head_dim, head.kv_heads * head.head_dim
    tensors = {"fc.weight": matrix(hidden, len(head.taps) * head.target_hidden)}
    for i in range(head.layers):
        name, inputs = head.layer(i), head.inputs(i)
        for part, shape in {
            "self_attn.q_proj": (queries, inputs),
            "self_attn.k_proj": (keys, inputs),
            "self_attn.v_proj": (keys, inputs),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (head.inner, hidden),
            "mlp.up_proj": (head.inner, hidden),
            "mlp.down_proj": (hidden, head.inner),
        }.items():
            tensors[f"{name}.{part}.weight"] = matrix(*shape)
            if head.bias and part.startswith("self_attn"):
                tensors[f"{name}.{part}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
        if head.qk_norm:
            tensors |= {f"{name}.self_attn.{part}_norm.weight": norm(head.head_dim) for part in "qk"}
    tensors |= {f"{name}.weight": norm(width) for name, width in {"norm": hidden, **head.norms()}.items()}
    if head.own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(head.target_vocab, hidden, generator=generator)
    if head.own_head:
        tensors["lm_head.weight"] = matrix(head.draft_vocab, hidden)
    tensors |= head.tensors(generator)
    if head.draft_vocab != head.target_vocab:
        ids = torch.randperm(head.target_vocab, generator=generator)[: head.draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(head.draft_vocab)
    return tensors


def write_head(head: CommonSettings, folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write the files of a head, with the tensors that only training reads. tensors: None: random ones."""
    layer: dict[str, object] = {
        "model_type": "qwen3" if head.qk_norm else "llama",
        "vocab_size": head.target_vocab,
        "hidden_size": head.hidden,
        "intermediate_size": head.inner,
        "num_hidden_layers": head.layers,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.eps,
        "rope_theta": head.theta,
        "max_position_embeddings": 16,  # less than the target's, as in published heads
        "attention_bias": head.bias,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**head.config(layer), **head.more}))
    tensors = make_tensors(head) if tensors is None else tensors
    stored = {(name if name == "lm_head.weight" else head.prefix + name): tensor for name, tensor in tensors.items()}
    unused = {
        "t2d": torch.zeros(head.target_vocab, dtype=torch.bool),
        "verifier_norm.weight": torch.ones(head.target_hidden),
        "verifier_lm_head.weight": torch.ones(head.draft_vocab, head.target_hidden),
    }
    stored |= {("" if "lm_head" in name else head.prefix) + name: unused[name] for name in head.unused}
    save_file(stored, folder / "model.safetensors")
    return folder


def write_changed(folder: Path, head: CommonSettings, **changes: object) -> Path:
    """Write a head whose config.json has some other values. None: the key is left out. Objects are merged."""
    write_head(head, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class ReferenceLayers:
    """The parts of a head's layers, over all tokens of one sequence."""

    def __init__(self, head: CommonSettings, tensors: dict[str, Tensor], embedding: Tensor, output: Tensor) -> None:
        """embedding, output: the target's matrices [vocab, hidden], for a head without its own."""
        self.common = head
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding = self.t.get("embed_tokens.weight", embedding.double())
        self.output = self.t.get("lm_head.weight", output.double())

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.common.eps)

    def product(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def heads(self, i: int, part: str, x: Tensor, first: int) -> Tensor:
        """Return heads [heads, tokens, dim]. Queries and keys are normed and rotated; `first` is the first position."""
        head, name = self.common, f"{self.common.layer(i)}.self_attn.{part}"
        y = self.product(f"{name}_proj", x).unflatten(-1, (-1, head.head_dim)).transpose(0, 1)
        if part == "v":
            return y
        if head.qk_norm:
            y = self.norm(f"{name}_norm", y)
        half = head.head_dim // 2
        frequencies = torch.tensor(head.theta).pow(-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(first, first + len(x), dtype=torch.float64)[:, None] * frequencies
        a, b = y[..., :half], y[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def attend_and_add(self, i: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Return the residual after the layer. q, k, v: [heads, tokens, dim]. visible: [queries, keys]."""
        head, name = self.common, self.common.layer(i)
        k, v = (one.repeat_interleave(head.heads // head.kv_heads, dim=0) for one in (k, v))
        scores = (q @ k.mT * head.head_dim**-0.5).masked_fill(~visible, -torch.inf)
        x = x + self.product(f"{name}.self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        h = self.norm(f"{name}.post_attention_layernorm", x)
        gated = F.silu(self.product(f"{name}.mlp.gate_proj", h)) * self.product(f"{name}.mlp.up_proj", h)
        return x + self.product(f"{name}.mlp.down_proj", gated)
