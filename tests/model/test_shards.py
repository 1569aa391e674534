"""A model spread over ranks computes the same as on one rank, and as transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder

from .checkpoints import CASES, write_checkpoint
from .harness import Running
from .ranks import Counted, InPieces, Ranks

ALWAYS = (
    "qwen2-moe",
    "qwen3-5-linear-last",
)  # the others are slow tests
COUNTS = (pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow))
NEW_TOKENS = 8
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 131}
LINEAR = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}  # of recurrent layers


def sizes_of(case: str) -> dict[str, object]:
    if case.startswith(("deepseek", "glm4-flash", "kimi")):  # each head derives its own keys
        return {**SIZES, "num_key_value_heads": 8}
    if case in ("granite4-hybrid-moe", "falcon-h1-norm"):  # with one group, ranks share it
        return {**SIZES, "mamba_n_groups": 8}
    if case.startswith("nemotron"):
        return {**SIZES, "n_groups": 8}
    return {**SIZES, **LINEAR} if case.startswith(("qwen3-5", "qwen3-next")) else {**SIZES}


def slow_but(case: str) -> object:
    return pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow)


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in (5, 23, 40)]


def logits(sequences: list[Running]) -> Tensor:
    return torch.stack([torch.stack(sequence.logits) for sequence in sequences])  # [prompts, new tokens, vocab]


def expected_logits(model: PreTrainedModel, sequences: list[Running]) -> Tensor:
    """Return the logits of transformers for the same tokens."""
    with torch.no_grad():
        rows = [model(torch.tensor([one.tokens[:-1]])).logits[0, -NEW_TOKENS:] for one in sequences]
    return torch.stack(rows)


def assert_equal(
    folder: Path, model: PreTrainedModel, count: int, vocab: int = 131, collective: type[Counted] = Counted
) -> None:
    [alone] = Ranks(folder, 1).generate(prompts(vocab), NEW_TOKENS)
    ranks = Ranks(folder, count, collective=collective).generate(prompts(vocab), NEW_TOKENS, chunk=11)
    for sequences in ranks:
        assert [one.tokens for one in sequences] == [one.tokens for one in alone]
        assert torch.equal(logits(sequences), logits(ranks[0]))  # to the last bit, because all ranks must draw the same
    # Sums of 8 ranks are rounded differently from those of one rank, and differently on each kind of CPU.
    torch.testing.assert_close(logits(ranks[0]), logits(alone), atol=3e-4, rtol=0)
    torch.testing.assert_close(logits(ranks[0]), expected_logits(model, alone), atol=3e-4, rtol=0)


WAYS: dict[str, tuple[int, dict[str, object], type[Counted]]] = {
    "4 ranks": (4, {}, Counted),
    "2 ranks": (2, {}, Counted),
    "8 ranks": (8, {}, Counted),
    "8 ranks with a KV head each": (8, {"num_key_value_heads": 8}, Counted),
    "2 ranks, tokens in pieces": (2, {}, InPieces),  # sums of some pieces run while other pieces are computed
}


@pytest.mark.turns("way", count=2)
@pytest.mark.parametrize("case", [slow_but(case) for case in CASES])
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "4 ranks" else pytest.mark.slow) for way in WAYS])
def test_ranks_compute_what_one_does(case: str, way: str, tmp_path: Path) -> None:
    """By default there are fewer KV heads than ranks. The ways take turns: two for each family."""
    count, sizes, collective = WAYS[way]
    if case == "mimo-v2-flash" and sizes:  # layers with a window have twice as many KV heads
        sizes = {"num_key_value_heads": 4}
    model = write_checkpoint(case, tmp_path, **{**sizes_of(case), **sizes})
    assert_equal(tmp_path, model, count, collective=collective)


def test_a_norm_follows_the_sum_of_both_mixers(tmp_path: Path) -> None:
    """Attention is added to x after Mamba2. The sum of Mamba2's results must not compute the next norm."""
    model = write_checkpoint("falcon-h1", tmp_path, **SIZES, ssm_out_multiplier=1.0)
    assert_equal(tmp_path, model, 2)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_without_a_row_of_the_vocabulary(tied: bool, tmp_path: Path) -> None:
    model = write_checkpoint("qwen3", tmp_path, **{**SIZES, "vocab_size": 9, "tie_word_embeddings": tied})
    assert_equal(tmp_path, model, 8, vocab=9)


@pytest.mark.parametrize("count", COUNTS)
def test_ranks_have_whole_experts_if_columns_do_not_divide(count: int, tmp_path: Path) -> None:
    """The ranks have different numbers of experts."""
    model = write_checkpoint("qwen3-moe", tmp_path, **{**SIZES, "num_experts": 9, "moe_intermediate_size": 33})
    model.set_experts_implementation("eager")  # grouped products need multiples of 16 bytes
    assert_equal(tmp_path, model, count)


@pytest.mark.parametrize("columns", [pytest.param(32, marks=pytest.mark.slow), 33])
def test_experts_in_one_tensor(columns: int, tmp_path: Path) -> None:
    """Return the matrices as transformers keeps them in memory: gate above up, for all experts."""
    model = write_checkpoint("qwen3-moe", tmp_path, **{**SIZES, "num_experts": 9, "moe_intermediate_size": columns})
    model.set_experts_implementation("eager")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(9)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{name}.gate_up_proj": torch.cat((gate, up), 1), f"{name}.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(tmp_path, model, 4)


@pytest.mark.parametrize("case", ["llama2", "qwen3-moe", "qwen2-moe"])
def test_a_block_ends_with_one_sum(case: str, tmp_path: Path) -> None:
    """This includes a mixture with a shared expert. One more sum is for the embedding."""
    write_checkpoint(case, tmp_path, **SIZES)
    ranks = Ranks(tmp_path, 2)
    ranks.generate(prompts(131), 1)
    assert [one.sums for one in ranks.collectives] == [1 + 2 * 2] * 2


def test_what_is_not_finite_on_one_rank_is_seen_by_all(tmp_path: Path) -> None:
    """Values of the last layer, which only the sums over attention's output can show."""
    write_checkpoint("llama2", tmp_path, **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][-1] = float("inf")  # the last rank's part
    save_file(tensors, tmp_path / "model.safetensors")

    def sums(decoder: Decoder) -> Tensor:
        found = torch.zeros(3)
        batch = AttentionBatch(
            slots=torch.arange(16, 19),
            page_table=torch.tensor([[1]], dtype=torch.int32),
            seq_lens=torch.tensor([3], dtype=torch.int32),
            query_starts=torch.tensor([0, 3], dtype=torch.int32),
            num_decodes=0,
            query_lens=[3],
            context_lens=[3],
        )
        kv = KVPool(decoder.config.kv_shape(16, torch.float32), 2, decoder.device)
        with torch.inference_mode():
            decoder.forward(
                torch.tensor([5, 6, 7]), torch.arange(3), batch, kv, torch.tensor([], dtype=int), sums=found
            )
        return found

    assert all(not found.isfinite().any() for found in Ranks(tmp_path, 2).each(sums))


@pytest.mark.parametrize("case", [slow_but(case) for case in CASES])
def test_bfloat16_is_as_near_to_the_truth_as_alone(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path, **sizes_of(case))
    [exact] = Ranks(tmp_path, 1).generate(prompts(131), 1)
    [alone] = Ranks(tmp_path, 1, torch.bfloat16).generate(prompts(131), 1)
    ranks = Ranks(tmp_path, 4, torch.bfloat16).generate(prompts(131), 1)
    assert all(torch.equal(logits(sequences), logits(ranks[0])) for sequences in ranks)
    allowed = 2 * (logits(alone).float() - logits(exact)).square().mean().sqrt()
    assert (logits(ranks[0]).float() - logits(exact)).square().mean().sqrt() < allowed


@pytest.mark.parametrize("case", ["qwen3", "qwen2-moe"])
def test_random_weights(case: str, tmp_path: Path) -> None:
    """A model of random weights, not one rank of it: every rank has its part, and all agree."""
    write_checkpoint(case, tmp_path, **SIZES)
    ranks = Ranks(tmp_path, 4, load_format="dummy").generate(prompts(131), 2)
    assert all(torch.equal(logits(sequences), logits(ranks[0])) for sequences in ranks)
    assert logits(ranks[0]).isfinite().all()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3", {"num_attention_heads": 6}, "6 query heads cannot be divided evenly among 4 ranks; use 1 or 2"),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 KV heads .* use 1 or 2"),
        ("llama2", {"intermediate_size": 98}, "98 columns of the MLP .* use 1 or 2"),
        ("qwen3-moe", {"num_experts": 3, "moe_intermediate_size": 33}, "3 experts of 33 columns .* use 1 or 2"),
        ("qwen3-5", {"num_attention_heads": 4}, "2 key heads of linear attention .* use 1 or 2"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 33}, "33 columns of the shared expert .* use 1"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_numbers(
    case: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_checkpoint(case, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    if "num_experts" in changes:
        values.pop("num_local_experts", None)
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {message}$"):
        ModelConfig.from_folder(tmp_path).spread_over(4)
