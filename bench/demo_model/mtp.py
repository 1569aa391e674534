"""The demo model's MTP layer: it drafts tokens from the target's states, for speculative decoding.

At position p the layer reads the embedding of the token at p + 1 and the state at p. Its output predicts the token at
p + 2. The first draft reads the target's state, which is the output of the target's last norm. Each further draft reads
the output of the layer itself. The embedding and the output matrix are the target's.

A chain is the sequence of drafts after one position of the target. Its first draft attends to all positions of the
target up to its own. Its further drafts also attend to the earlier drafts of the chain.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.demo_model import network as net

INTERMEDIATE_SIZE = 320  # of the MLP; with it the layer has 1.41 MB
PREFIX = "mtp."  # of the names of tensors


class MTP(nn.Module):
    """The layer. Its parameters have the names of Qwen3.5's checkpoints without `mtp.`."""

    def __init__(self, shape: net.Shape, intermediate_size: int = INTERMEDIATE_SIZE) -> None:
        """shape: of the target. intermediate_size: of the layer's MLP."""
        super().__init__()
        self.shape = replace(shape, intermediate_size=intermediate_size)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = net.Norm(hidden, eps)
        self.pre_fc_norm_hidden = net.Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([net.Layer(self.shape)])
        self.norm = net.Norm(hidden, eps)
        self.rope: Tensor
        self.register_buffer("rope", net.rope_table(shape, torch.device("cpu")), persistent=False)
        net.initialize(self, shape)

    @property
    def layer(self) -> net.Layer:
        """The only layer."""
        layer = self.layers[0]
        if not isinstance(layer, net.Layer):
            raise TypeError(f"an MTP layer is a Layer, not {type(layer).__name__}")
        return layer

    def forward(self, embedded: Tensor, states: Tensor, anchors: Tensor, depth: int) -> list[Tensor]:
        """Return the output of each draft of the chains after the anchors, `depth` tensors [rows, chains, hidden].

        The drafts are taken to be right: each one reads the token that really follows.

        Args:
            embedded: Embeddings of the tokens, [rows, tokens, hidden].
            states: The target's states, [rows, tokens, hidden].
            anchors: Positions of the states that the chains begin with, int64 [rows, chains], below tokens - depth.
            depth: Drafts in a chain.
        """
        width = embedded.shape[-1]
        x = self._mix(embedded[:, 1:], states[:, :-1])
        positions = torch.arange(x.shape[1], device=x.device)
        keys, values = self._keys_and_values(self.layer.input_layernorm(x), positions[None])
        seen = positions <= anchors[:, :, None]  # [rows, chains, tokens - 1]
        x = x.gather(1, anchors[:, :, None].expand(-1, -1, width))
        drafted: list[net.KeyValue] = []
        outputs: list[Tensor] = []
        for step in range(depth):
            if step:
                following = embedded.gather(1, (anchors + step + 1)[:, :, None].expand(-1, -1, width))
                x = self._mix(following, outputs[-1])
            normed = self.layer.input_layernorm(x)
            if step:
                drafted.append(self._keys_and_values(normed, anchors + step))
            x = x + self._attend(normed, anchors + step, (keys, values), seen, drafted)
            x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
            outputs.append(self.norm(x))
        return outputs

    def _mix(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the layer's input for the embeddings of the next tokens and for states, both [..., hidden]."""
        parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        return torch.as_tensor(self.fc(torch.cat(parts, dim=-1)))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [rows, heads, tokens, dim] to positions [rows or 1, tokens]."""
        return net.rotate(x, self.rope[:, positions][:, :, None])

    def _keys_and_values(self, normed: Tensor, positions: Tensor) -> net.KeyValue:
        """Return rotated keys and values, both [rows, kv_heads, tokens, dim]."""
        attention = self.layer.self_attn
        heads = (*normed.shape[:2], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(normed).view(heads)).transpose(1, 2)
        return self._rotated(keys, positions), attention.v_proj(normed).view(heads).transpose(1, 2)

    def _attend(
        self, normed: Tensor, positions: Tensor, prefix: net.KeyValue, seen: Tensor, drafted: list[net.KeyValue]
    ) -> Tensor:
        """Attend from each chain's newest draft, [rows, chains, hidden].

        Args:
            normed: Inputs, [rows, chains, hidden].
            positions: Their positions, [rows, chains].
            prefix: Keys and values at the target's positions.
            seen: The target's positions before each chain, bool [rows, chains, positions].
            drafted: Keys and values of the chains' drafts after the first, [rows, kv_heads, chains, dim] each.
        """
        attention = self.layer.self_attn
        keys, values = prefix
        rows, kv_heads, tokens, dim = keys.shape
        chains = normed.shape[1]
        q = attention.q_norm(attention.q_proj(normed).view(rows, chains, -1, dim)).transpose(1, 2)
        q = self._rotated(q, positions).reshape(rows, kv_heads, -1, chains, dim) * dim**-0.5
        scores = q.flatten(2, 3) @ keys.transpose(2, 3)
        scores = scores.view(*q.shape[:-1], tokens).masked_fill(~seen[:, None, None], float("-inf"))
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in drafted]
        shares = torch.cat((scores, *own), dim=-1).softmax(-1)
        out = (shares[..., :tokens].flatten(2, 3) @ values).view(q.shape)
        for i, (_, value) in enumerate(drafted):
            out = out + shares[..., tokens + i, None] * value[:, :, None]
        return torch.as_tensor(attention.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2)))


def save(mtp: MTP, folder: Path) -> None:
    """Add the layer to the checkpoint in `folder`, in bfloat16. The target's tensors keep their bits."""
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    for name, value in mtp.named_parameters():
        tensors[f"{PREFIX}{name}"] = value.detach().bfloat16().cpu().contiguous()
    save_file(tensors, str(path), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text |= {"mtp_num_hidden_layers": 1, "mtp_intermediate_size": mtp.shape.intermediate_size}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: Path, shape: net.Shape) -> MTP:
    """Read the layer that `save` wrote, in float32. shape: of the target."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    mtp = MTP(shape, config.get("text_config", config)["mtp_intermediate_size"])
    weights = load_file(str(folder / "model.safetensors"))
    mtp.load_state_dict({n.removeprefix(PREFIX): w.float() for n, w in weights.items() if n.startswith(PREFIX)})
    return mtp.eval()
