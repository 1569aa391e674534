"""Adapters of all kinds of bases: on several ranks, in several files, with tied embeddings, quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aengine.model.config import ModelConfig

from ..checkpoints import write_checkpoint
from ..harness import Harness
from ..quant.checkpoints import write_quantized
from ..quant.schemes import slow_but_some
from ..ranks import Ranks
from .adapters import NEW_TOKENS, assert_computes, assert_mixed, load, mixed, put, room_for, write_adapter

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 131}
HEAD = ["lm_head", "q_proj", "v_proj", "o_proj", "up_proj"]
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["k_proj"]}
BASES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {  # the case, its sizes, an adapter's settings
    "more ranks than KV heads": ("qwen3-bias-untied", {}, {"target_modules": HEAD}),
    "a tied output matrix": ("llama3", {}, {"target_modules": HEAD}),
    "biases everywhere": ("llama-all-biases", {}, {}),
    "a shared expert": ("qwen2-moe", {}, {}),
    "columns of experts": ("qwen3-moe", {}, EXPERTS),
    "whole experts": ("mixtral", {"intermediate_size": 97}, EXPERTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("base", BASES)
def test_over_ranks(base: str, count: int, tmp_path: Path) -> None:
    case, sizes, settings = BASES[base]
    model = write_checkpoint(case, tmp_path / "base", **(SIZES | sizes))
    model.set_experts_implementation("eager")  # the others need widths of whole vectors
    adapters = [tmp_path / "one", tmp_path / "two"]
    models = [model, *(write_adapter(model, path, seed, **settings) for seed, path in enumerate(adapters))]
    room = room_for(ModelConfig.from_folder(tmp_path / "base"), adapters)
    ranks = Ranks(tmp_path / "base", count, lora=room)
    put(ranks.decoders, adapters)
    for sequences in ranks.each(lambda one: Harness(one, page_size=16).run(mixed(2, 131), NEW_TOKENS, chunk=11)):
        for place, merged in enumerate(models):
            assert_computes(merged, [one for one in sequences if one.adapter == place])


def test_in_several_files(tmp_path: Path) -> None:
    base = write_checkpoint("qwen2", tmp_path / "whole")
    base.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 3
    merged = write_adapter(base, tmp_path / "adapter")
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged])


@pytest.mark.parametrize("scheme", slow_but_some(("gptq", "fp8-blocks-part-unchanged", "awq"), ("gptq",)))
def test_beside_quantised_matrices(scheme: str, tmp_path: Path) -> None:
    write_quantized(scheme, "qwen3-bias-untied", tmp_path / "base", tmp_path / "twin", hidden_size=128)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32).eval()
    merged = write_adapter(base, tmp_path / "adapter")
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged])


@pytest.mark.parametrize("rank", [1, 8, 64, 256])
def test_of_any_rank_in_bfloat16(rank: int, tmp_path: Path) -> None:
    """The two differ only by the model's own rounding."""
    base = write_checkpoint("qwen3", tmp_path / "base")
    merged = write_adapter(base, tmp_path / "adapter", r=rank, lora_alpha=rank, target_modules=["q_proj", "down_proj"])
    decoder = load(tmp_path / "base", [tmp_path / "adapter"], torch.bfloat16)
    [sequence] = Harness(decoder, page_size=16).run(mixed(1, 128)[1:2], NEW_TOKENS)
    with torch.no_grad():
        expected = merged(torch.tensor([sequence.tokens[:-1]])).logits[0, -NEW_TOKENS:]
    error = (torch.stack(sequence.logits).float() - expected).norm() / expected.norm()
    assert error < 0.05
