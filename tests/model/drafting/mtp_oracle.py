"""A plain computation of MTP layers in float64, one sequence at a time, without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.drafting.mtp_checkpoints import text_config


class Oracle:
    """The MTP layer of a folder. Tensors are read by their published names."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.config: dict[str, Any] = text_config(folder)
        self.is_qwen = "mtp.fc.weight" in self.tensors
        last = self.config["num_hidden_layers"]
        self.layer = "mtp.layers.0" if self.is_qwen else f"model.layers.{last}"
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        others = tuple(f"{self.layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        self.names = names if self.is_qwen else others
        # In Qwen3.5 and Qwen3-Next, but not in Qwen3, stored weights of norms are differences from 1.
        self.one = 1.0 if self.is_qwen and self.config["model_type"] != "qwen3" else 0.0
        [embedding] = [name for name in self.tensors if "embed_tokens" in name and self.layer not in name]
        self.embedding = self.tensors[embedding]
        self.output = self.tensors.get("lm_head.weight", self.embedding)

    def draft(self, next_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits after the last pair, and the state that stands for the next position.

        next_ids: the token after each position. states: [positions, hidden].
        """
        embedding_norm, state_norm, projection, final_norm = self.names
        embedded = self.embedding[next_ids].clone()
        if not self.is_qwen:
            embedded[0] = 0.0
        joined = torch.cat((self.norm(embedded, embedding_norm), self.norm(states, state_norm)), dim=-1)
        x = self.linear(joined, projection)
        h = self.norm(x, f"{self.layer}.input_layernorm")
        x = x + (self.latent_attention(h) if "kv_lora_rank" in self.config else self.attention(h))
        h = self.norm(x, f"{self.layer}.post_attention_layernorm")
        x = x + (self.experts(h) if f"{self.layer}.mlp.gate.weight" in self.tensors else self.mlp(h, "mlp"))
        normed = self.norm(x, final_norm)
        recycles_normed = self.is_qwen or self.config["model_type"] == "deepseek_v3"
        return self.output @ normed[-1], (normed if recycles_normed else x)[-1]

    # ---- parts

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + (self.config["rms_norm_eps"] if eps is None else eps)).rsqrt()
        return x * scale * (self.tensors[f"{name}.weight"] + self.one)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def mlp(self, x: Tensor, part: str) -> Tensor:
        gate, up = (self.linear(x, f"{self.layer}.{part}.{name}_proj") for name in ("gate", "up"))
        return self.linear(gate * gate.sigmoid() * up, f"{self.layer}.{part}.down_proj")

    def attention(self, h: Tensor) -> Tensor:
        config, attn = self.config, f"{self.layer}.self_attn"
        heads, kv_heads, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (self.linear(h, f"{attn}.{one}_proj") for one in "qkv")
        gate = None
        if q.shape[1] == 2 * heads * dim:  # each head is followed by its gate
            q, gate = q.view(-1, heads, 2, dim).unbind(2)
        q, k, v = q.reshape(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        if f"{attn}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{attn}.q_norm"), self.norm(k, f"{attn}.k_norm")
        rotated = int(dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))
        q, k = (torch.cat((self.rotate(x[..., :rotated]), x[..., rotated:]), dim=-1) for x in (q, k))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        read = attend(q, k, v)
        return self.linear((read if gate is None else read * gate.sigmoid()).flatten(1), f"{attn}.o_proj")

    def latent_attention(self, h: Tensor) -> Tensor:
        """Keys and values of every head are computed from the latent."""
        config, attn = self.config, f"{self.layer}.self_attn"
        heads, plain, rotated, value = (
            config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        q = self.linear(
            self.norm(self.linear(h, f"{attn}.q_a_proj"), f"{attn}.q_a_layernorm", 1e-6), f"{attn}.q_b_proj"
        )
        q_plain, q_rotated = q.view(-1, heads, plain + rotated).split([plain, rotated], dim=-1)
        latent, k_rotated = self.linear(h, f"{attn}.kv_a_proj_with_mqa").split(
            [config["kv_lora_rank"], rotated], dim=-1
        )
        kv = self.linear(self.norm(latent, f"{attn}.kv_a_layernorm", 1e-6), f"{attn}.kv_b_proj")
        k_plain, v = kv.view(-1, heads, plain + value).split([plain, value], dim=-1)
        # Neighbouring numbers are one pair. Sorting them into halves changes no score.
        q_rotated, k_rotated = (
            self.rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)) for x in (q_rotated, k_rotated.unsqueeze(1))
        )
        k = torch.cat((k_plain, k_rotated.expand(-1, heads, -1)), dim=-1)
        return self.linear(attend(torch.cat((q_plain, q_rotated), dim=-1), k, v).flatten(1), f"{attn}.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """x: [positions, heads, dim]; its first half and its second half are the parts of each pair."""
        half = x.shape[-1] // 2
        speed = self.config["rope_parameters"]["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * speed
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)

    def experts(self, h: Tensor) -> Tensor:
        return torch.stack([self.experts_of_token(row) for row in h])

    def experts_of_token(self, row: Tensor) -> Tensor:
        config, name = self.config, f"{self.layer}.mlp"
        scores = self.linear(row, f"{name}.gate")
        if self.is_qwen:
            chances = scores.softmax(-1)
            chosen = chances.topk(config["num_experts_per_tok"]).indices
            weights = chances[chosen] / chances[chosen].sum()
            shared = self.mlp(row, "mlp.shared_expert") * self.linear(row, f"{name}.shared_expert_gate").sigmoid()
        else:
            chances = scores.sigmoid()
            ranked = chances + self.tensors[f"{name}.gate.e_score_correction_bias"]
            groups = ranked.view(config["n_group"], -1)
            best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices
            allowed = torch.full_like(groups, -torch.inf)
            allowed[best] = groups[best]
            chosen = allowed.flatten().topk(config["num_experts_per_tok"]).indices
            weights = chances[chosen]
            if config["norm_topk_prob"]:
                weights = weights / weights.sum()
            weights = weights * config["routed_scaling_factor"]
            shared = self.mlp(row, "mlp.shared_experts")
        return shared + sum(
            weight * self.mlp(row, f"mlp.experts.{expert}") for weight, expert in zip(weights, chosen.tolist())
        )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, all [positions, heads, dim]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
