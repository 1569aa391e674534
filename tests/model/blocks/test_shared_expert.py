"""The shared expert on a device that computes it in the same launches as the chosen experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.slots import LinearSlot

from ..checkpoints import write_checkpoint
from ..harness import Harness
from ..lora.adapters import NEW_TOKENS, assert_computes, load, mixed, write_adapter
from ..ranks import Ranks


@dataclass(frozen=True)
class Together:
    """The chosen experts and the shared one, for a few tokens."""

    chosen: Experts
    gate_up: Linear
    down: Linear
    gate: Tensor | None

    @property
    def hidden(self) -> int:
        return self.chosen.hidden

    @property
    def experts(self) -> int:
        return self.chosen.experts

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        kernels, gate_up = TorchKernels(), self.gate_up.apply(h)
        inner = kernels.silu_mul(gate_up) if self.gate is None else kernels.gated_silu_mul(gate_up, h, self.gate)
        return self.chosen.add_to(
            h, ids, weights, self.down.apply(inner) if residual is None else residual + self.down.apply(inner)
        )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call."""
    counts: list[int] = []

    def with_shared(
        self: TorchKernels, experts: Experts, gate_up: Linear, down: Linear, gate: Tensor | None, h: Tensor, top_k: int
    ) -> Together | None:
        assert not any(isinstance(linear, LinearSlot) for linear in (gate_up, down))
        if len(h) > 4:
            return None
        counts.append(len(h))
        return Together(experts, gate_up, down, gate)

    monkeypatch.setattr(TorchKernels, "with_shared", with_shared)
    return counts


@pytest.mark.parametrize("case", ["qwen2-moe", "glm4-moe"])  # with a gate, and without
def test_of_a_few_tokens_both_are_one(case: str, tmp_path: Path, calls: list[int]) -> None:
    base = write_checkpoint(case, tmp_path)
    assert_computes(base, Harness(load(tmp_path, []), page_size=16).run(mixed(0, 128)[:3], NEW_TOKENS))
    assert 3 in calls


def test_of_ranks_both_are_one_part(tmp_path: Path, calls: list[int]) -> None:
    base = write_checkpoint("qwen2-moe", tmp_path, num_attention_heads=8, num_key_value_heads=2)
    for sequences in Ranks(tmp_path, 2).each(lambda one: Harness(one, 16).run(mixed(0, 128)[:1], NEW_TOKENS)):
        assert_computes(base, sequences)
    assert calls


def test_of_tokens_with_adapters_each_is_on_its_own(tmp_path: Path, calls: list[int]) -> None:
    base = write_checkpoint("qwen2-moe", tmp_path / "base")
    merged = write_adapter(base, tmp_path / "adapter")
    harness = Harness(load(tmp_path / "base", [tmp_path / "adapter"]), page_size=16)
    plain, adapted, *_ = mixed(1, 128)
    assert_computes(merged, harness.run([adapted], NEW_TOKENS))
    assert not calls
    assert_computes(base, harness.run([plain], NEW_TOKENS))
    assert calls
