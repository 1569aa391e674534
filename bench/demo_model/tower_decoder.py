"""The demo model reads pictures: its decoder's pass over pictures and the questions about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.demo_model import network as net
from bench.demo_model.tower import SECTIONS
from bench.demo_model.tower_samples import Batch


def answer_loss(network: net.Network, batch: Batch, embedded: Tensor, deep: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of the answers' tokens, and the share of them that is predicted right.

    embedded, deep: the tower's output for the batch's pictures.
    """
    trained = batch.targets >= 0
    logits = network.logits(states_of(network, batch, embedded, deep)[trained[batch.there]])
    targets = batch.targets[trained]
    return F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()


def states_of(network: net.Network, batch: Batch, embedded: Tensor, deep: Sequence[Tensor]) -> Tensor:
    """Return the output of the decoder's last norm at the tokens of all chats, [tokens, hidden], without padding."""
    before, there = batch.before, batch.there
    start = network.embed_tokens(before).expand(len(embedded), -1, -1)
    x, y = torch.cat((start, embedded), dim=1), network.embed_tokens(batch.ids[there])[None]
    own, text = positions_of(batch)
    own_table, table = rope_of(network, own), rope_of(network, text[:, there.nonzero()[:, 1]])
    length = batch.ids.shape[1]
    seen = torch.ones(length, x.shape[1] + length, dtype=torch.bool, device=y.device).tril(x.shape[1])
    packed = (there.flatten().cumsum(0) - 1).clamp(min=0).view_as(there)  # the index of each token in `y`
    for i, layer in enumerate(network.layers):
        if not isinstance(layer, net.Layer):
            raise TypeError(f"{type(layer).__name__} is no layer of the decoder")
        q, k, v = _heads(layer, x, own_table)
        x = _after(layer, x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        q, own_k, own_v = (one[0].transpose(0, 1)[packed].transpose(1, 2) for one in _heads(layer, y, table))
        k, v = (torch.cat((a[batch.picture], b), dim=2) for a, b in ((k, own_k), (v, own_v)))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        y = _after(layer, y, attended.transpose(1, 2)[there].transpose(0, 1)[None])
        if i < len(deep):
            x = torch.cat((x[:, : len(before)], x[:, len(before) :] + deep[i]), dim=1)
    return torch.as_tensor(network.norm(y[0]))


def positions_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return time, row and column of the tokens up to the end of a picture, and of those after it, [3, tokens]."""
    rows, columns, start = batch.pictures.rows, batch.pictures.columns, len(batch.before)
    grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack((torch.zeros(rows * columns, dtype=torch.int64), *(one.flatten() for one in grid)))
    own = torch.cat((torch.arange(start).expand(3, -1), start + places), dim=1)
    after = start + max(rows, columns) + torch.arange(batch.ids.shape[1])
    return own.to(batch.ids.device), after.expand(3, -1).to(batch.ids.device)


def rope_of(network: net.Network, positions: Tensor) -> Tensor:
    """Return cos and sin for `net.rotate`, [2, 1, 1, tokens, frequencies], of positions [3, tokens]."""
    frequencies = network.shape.head_dim // 2
    _, rows, columns = SECTIONS
    ends = (0, 3 * rows, 3 * columns)
    axes = torch.tensor([i % 3 if i < ends[i % 3] else 0 for i in range(frequencies)], device=positions.device)
    table = network.rope[:, positions]  # [2, 3, tokens, frequencies]
    return table[:, axes, :, torch.arange(frequencies, device=positions.device)].permute(1, 2, 0)[:, None, None]


def _heads(layer: net.Layer, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, each [batch, heads, tokens, dim]."""
    attention, normed = layer.self_attn, layer.input_layernorm(x)
    shape = (*x.shape[:2], -1, attention.head_dim)
    q = net.rotate(attention.q_norm(attention.q_proj(normed).view(shape)).transpose(1, 2), table)
    k = net.rotate(attention.k_norm(attention.k_proj(normed).view(shape)).transpose(1, 2), table)
    return q, k, attention.v_proj(normed).view(shape).transpose(1, 2)


def _after(layer: net.Layer, x: Tensor, attended: Tensor) -> Tensor:
    x = x + torch.as_tensor(layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2)))
    return x + torch.as_tensor(layer.mlp(layer.post_attention_layernorm(x)))
