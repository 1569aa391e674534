"""The reference: plain torch on any device, expert by expert. Every other implementation is tested against this one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.experts.rule import SILU, ExpertRule


class TorchExperts:
    """Experts whose matrices are as in the checkpoint. It reads from the device which experts have tokens."""

    def __init__(self, gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> None:
        """gate_up [experts, 2 * inter, hidden], gate's rows first, or up [experts, inter, hidden] if there is no gate;
        down [experts, hidden, inter].
        """
        self.experts, self.hidden, _ = down.shape
        self.gate_up_weight = gate_up
        self.down_weight = down
        self.rule = rule

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"gate_up": self.gate_up_weight, "down": self.down_weight, "rule": self.rule}

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        tokens, top_k = ids.shape
        flat = ids.flatten()
        rows = h.new_zeros(tokens * top_k, self.hidden)
        for expert in flat.unique().tolist():
            if not 0 <= expert < self.experts:
                continue
            pairs = (flat == expert).nonzero().flatten()
            own = pairs // top_k
            rows[pairs] = self.down(expert, self._activated(self.gate_up(expert, h[own], own)), own)
        wide = torch.promote_types(torch.float32, h.dtype)
        total = torch.zeros_like(h, dtype=wide) if residual is None else residual.to(wide)
        for j in range(top_k):
            total = total + weights[:, j, None] * rows.view(tokens, top_k, self.hidden)[:, j].to(wide)
        return total.to(h.dtype if residual is None else residual.dtype)

    def gate_up(self, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        """Return gate and up of x in one expert, [n, 2 * inter], or up. x: [n, hidden] of the step's `tokens`."""
        bias = None if self.rule.biases is None else self.rule.biases[0][expert]
        return F.linear(x, self.gate_up_weight[expert], bias)

    def down(self, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        """Return down of x in one expert, [n, hidden]. x: [n, inter] of the step's `tokens`."""
        bias = None if self.rule.biases is None else self.rule.biases[1][expert]
        return F.linear(x, self.down_weight[expert], bias)

    def _activated(self, gate_up: Tensor) -> Tensor:
        if not self.rule.gated:
            return F.relu(gate_up).square_()
        gate, up = gate_up.chunk(2, dim=-1)
        if self.rule.clamp is not None:
            return self.rule.clamp(gate, up)
        return (F.gelu(gate, approximate="tanh") if self.rule.gelu else F.silu(gate)) * up
