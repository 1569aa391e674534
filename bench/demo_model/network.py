"""The demo model for the trainer: Qwen3's layers with Hugging Face's parameter names, and decoding.

This is not the engine's decoder. It is small enough to check by eye, it trains, and it can answer the examination
independently of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of config.json that make the parameters."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


KeyValue = tuple[Tensor, Tensor]  # each [batch, kv_heads, positions, head_dim]


def rope_table(shape: Shape, device: torch.device) -> Tensor:
    """cos and sin of every position's angles, float32 [2, positions, head_dim / 2]."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float32, device=device)
    angles = positions[:, None] * shape.rope_theta**-steps
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the halves of each head. x [batch, heads, tokens, dim], table [2, batch or 1, 1, tokens, dim / 2]."""
    cos, sin = table.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Norm(nn.Module):
    """RMSNorm in the precision of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, table: Tensor, cache: KeyValue | None, positions: Tensor | None) -> Tensor:
        """x [batch, tokens, hidden]. With a cache, K and V go to `positions` [batch, tokens] and all of it is read."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), table)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), table)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mask = None
        if cache is not None and positions is not None:
            index = positions[:, None, :, None].expand(k.shape)
            k, v = cache[0].scatter_(2, index, k), cache[1].scatter_(2, index, v)
            mask = torch.arange(k.shape[2], device=x.device) <= positions[:, None, :, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return torch.as_tensor(self.o_proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, table: Tensor, cache: KeyValue | None, positions: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table, cache, positions)
        return x + torch.as_tensor(self.mlp(self.post_attention_layernorm(x)))


def initialize(module: nn.Module, shape: Shape) -> None:
    """Draw all matrices of the module. Matrices that add to the residual stream begin smaller."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / ((2 * shape.num_hidden_layers) ** 0.5 if residual else 1))


class Network(nn.Module):
    """Embedding, layers, norm; the embedding is also the output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.rope: Tensor
        self.register_buffer("rope", rope_table(shape, torch.device("cpu")), persistent=False)
        initialize(self, shape)

    def forward(self, ids: Tensor, caches: Sequence[KeyValue] | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocab] of ids [batch, tokens]."""
        return self.logits(self.states(ids, caches, positions))

    def states(self, ids: Tensor, caches: Sequence[KeyValue] | None = None, positions: Tensor | None = None) -> Tensor:
        """The output of the last norm [batch, tokens, hidden] for ids [batch, tokens]."""
        where = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        table = self.rope[:, where][:, :, None]  # [2, batch or 1, 1, tokens, head_dim / 2]
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, table, caches[i] if caches else None, positions)
        return torch.as_tensor(self.norm(x))

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocab] of states [..., hidden]."""
        return F.linear(states, self.embed_tokens.weight)

    def make_caches(self, rows: int, positions: int) -> list[KeyValue]:
        """Return caches of all layers, filled with zeros."""
        weight = self.embed_tokens.weight
        size = (rows, self.shape.num_key_value_heads, positions, self.shape.head_dim)
        return [(weight.new_zeros(size), weight.new_zeros(size)) for _ in self.layers]

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop_ids: Sequence[int],
        temperature: float = 0,
    ) -> list[list[int]]:
        """Continue each prompt, to a stop id (left out) or to `max_tokens`; greedily at temperature 0.

        Prompts are padded on the right; the padding's K and V are overwritten before any query may see them.
        """
        device = self.embed_tokens.weight.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = int(lengths.max())
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        caches = self.make_caches(len(prompts), longest + max_tokens)
        everywhere = torch.arange(longest, device=device).expand(len(prompts), -1)
        last = self(ids.to(device), caches, everywhere)[torch.arange(len(prompts)), lengths - 1]
        drawn: list[Tensor] = []
        stops = torch.tensor(stop_ids, device=device)
        finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for step in range(max_tokens):
            token = draw(last, temperature)
            drawn.append(token)
            finished |= torch.isin(token, stops)
            if finished.all():
                break
            last = self(token[:, None], caches, (lengths + step)[:, None])[:, 0]
        rows = torch.stack(drawn, dim=1).tolist()
        return [next((row[:i] for i, token in enumerate(row) if token in stop_ids), row) for row in rows]


def draw(logits: Tensor, temperature: float) -> Tensor:
    """Token ids [batch] of logits [batch, vocab]."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1)[:, 0]


def save(network: Network, folder: Path, *, turn_end: int, text_end: int) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    shape = asdict(network.shape)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape["num_hidden_layers"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": text_end,
    }
    generation = {"do_sample": False, "eos_token_id": [turn_end, text_end], "pad_token_id": text_end}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {
        f"model.{name}": value.detach().bfloat16().cpu().contiguous() for name, value in network.named_parameters()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load(folder: Path, device: torch.device) -> Network:
    """Read what `save` wrote, in float32. An MTP layer and a tower are left out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sees = "text_config" in config
    text = config.get("text_config", config)
    text = {"rope_theta": text.get("rope_parameters", {}).get("rope_theta")} | text
    network = Network(Shape(**{name: text[name] for name in asdict(Shape())}))
    weights = load_file(str(folder / "model.safetensors"))
    prefix = "model.language_model." if sees else "model."
    network.load_state_dict({n.removeprefix(prefix): w.float() for n, w in weights.items() if n.startswith(prefix)})
    return network.eval().to(device)
