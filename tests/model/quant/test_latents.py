"""Quantised models with latents: the matrix of keys and values is dequantised, all others stay quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import leave_empty

from ..ranks import Ranks
from .checkpoints import write_quantized
from .encoders import Scheme
from .schemes import SCHEMES, slow_but_some
from .test_logits import PROMPTS, logits

# Blocks of 128 rows hold parts of heads, and end within the projection to a latent, as in published models (576 rows).
SIZES: dict[str, object] = {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
QUICK = ("fp8-blocks", "gptq-desc-act")  # one with whole scales, one with packed codes in their own order
CASES = [
    ("deepseek-v3", SIZES),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("deepseek-v2-lite", {**SIZES, "q_lora_rank": None}), ("glm4-flash", SIZES))
    ),
]


def assert_alike(folder: Path) -> None:
    for ours, expected in zip(logits(folder / "quantised"), logits(folder / "twin"), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("case", "sizes"), CASES)
@pytest.mark.parametrize("scheme", slow_but_some(quick=QUICK))
def test_logits_are_those_of_the_dequantised_twin(
    scheme: str, case: str, sizes: dict[str, object], tmp_path: Path
) -> None:
    write_quantized(scheme, case, tmp_path / "quantised", tmp_path / "twin", **sizes)
    assert_alike(tmp_path)


@pytest.mark.parametrize(
    "name", ["re:.*kv_b_proj$", pytest.param("model.layers.1.self_attn.kv_b_proj", marks=pytest.mark.slow)]
)
def test_what_makes_keys_and_values_may_be_in_floats_beside_others(name: str, tmp_path: Path) -> None:
    """Quantised GLM-4.7-Flash checkpoints are published like this."""
    known, unchanged = SCHEMES["ct-int4-zeros"], ("kv_b_proj",) if "re:" in name else (name,)
    chosen = Scheme({**known.config, "ignore": ["lm_head", name]}, known.encode, ("lm_head", *unchanged))
    write_quantized(chosen, "deepseek-v3", tmp_path / "quantised", tmp_path / "twin", **SIZES)
    assert_alike(tmp_path)


@pytest.mark.parametrize("scheme", slow_but_some(("fp8-blocks", "awq", "gptq-desc-act"), QUICK[:1]))
def test_ranks_have_heads_of_their_own(scheme: str, tmp_path: Path) -> None:
    sizes = {**SIZES, "v_head_dim": 64, "moe_intermediate_size": 64, "intermediate_size": 256}
    write_quantized(scheme, "deepseek-v3", tmp_path / "quantised", tmp_path / "twin", **sizes)
    [alone] = Ranks(tmp_path / "twin", 1).generate(PROMPTS, 4)
    for sequences in Ranks(tmp_path / "quantised", 2).generate(PROMPTS, 4):
        for ours, expected in zip(sequences, alone, strict=True):
            torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-3, rtol=0)


@pytest.mark.parametrize("scheme", slow_but_some(quick=QUICK))
def test_a_rehearsal_asks_for_no_value(scheme: str, tmp_path: Path) -> None:
    write_quantized(scheme, "deepseek-v3", tmp_path / "quantised", tmp_path / "twin", **SIZES, intermediate_size=256)
    config = ModelConfig.from_folder(tmp_path / "quantised")
    leave_empty(Decoder(config, TorchKernels(), TorchAttention(), torch.bfloat16).groups)
    rank = ThreadCollective(1, 2, Meeting(2))
    leave_empty(Decoder(config.spread_over(2), TorchKernels(), TorchAttention(), torch.bfloat16, ranks=rank).groups)


def test_what_is_dequantised_is_counted_as_floats(tmp_path: Path) -> None:
    write_quantized("fp8-blocks", "deepseek-v3", tmp_path / "quantised", tmp_path / "twin", **SIZES)
    plain, quantised = (ModelConfig.from_folder(tmp_path / name) for name in ("twin", "quantised"))
    up = 3 * 4 * (48 + 32) * 128
    tables = 2 * 128 * 64
    saved = plain.weight_bytes(torch.bfloat16) - quantised.weight_bytes(torch.bfloat16)
    assert saved == plain.parameters - tables - up
