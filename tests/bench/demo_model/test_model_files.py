"""The embedded model: its files, and that it says what the README shows."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.demo_model import network as net
from bench.demo_model.acceptance import measure
from bench.demo_model.chat_format import Message, assistant, render, user
from bench.demo_model.evaluate import MODEL, by_reference
from bench.demo_model.problems import Problem, problems
from bench.demo_model.tokenizer import VOCAB_SIZE, Ids

LANGUAGE_MODEL = "model.language_model."  # begins the names of its tensors


def test_the_files_are_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(sizes) == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"),
    }
    assert sum(sizes.values()) <= 16_200_000


def text_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))["text_config"]
    return config


def test_the_checkpoint_is_qwen3_vl_in_bfloat16() -> None:
    outer = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert outer["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert outer["tie_word_embeddings"]
    config = text_config()
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 2048
    with safe_open(str(MODEL / "model.safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    target = [tensor.numel() for name, tensor in tensors.items() if name.startswith(LANGUAGE_MODEL)]
    assert 5_000_000 < sum(target) < 7_000_000
    assert "lm_head.weight" not in tensors


def test_the_targets_tensors_are_those_that_were_trained_before_the_mtp_layer_and_the_tower() -> None:
    digest = sha256()
    for name, tensor in sorted(load_file(MODEL / "model.safetensors").items()):
        if name.startswith(LANGUAGE_MODEL):
            plain = name.replace(LANGUAGE_MODEL, "model.")
            digest.update(plain.encode() + tensor.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "2504de32a6da5c558de14b3f8a4a2c2148609e7a7674b33192414c0bdb884c5c"


def test_the_mtp_layer_has_qwen3_5s_tensors_in_at_most_1_5_mb() -> None:
    config = text_config()
    assert config["mtp_num_hidden_layers"] == 1
    hidden, inner, head = config["hidden_size"], config["mtp_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    stored = load_file(MODEL / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        "mtp.layers.0.input_layernorm.weight": (hidden,),
        "mtp.layers.0.post_attention_layernorm.weight": (hidden,),
        "mtp.layers.0.self_attn.q_proj.weight": (queries, hidden),
        "mtp.layers.0.self_attn.k_proj.weight": (keys, hidden),
        "mtp.layers.0.self_attn.v_proj.weight": (keys, hidden),
        "mtp.layers.0.self_attn.o_proj.weight": (hidden, queries),
        "mtp.layers.0.self_attn.q_norm.weight": (head,),
        "mtp.layers.0.self_attn.k_norm.weight": (head,),
        "mtp.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.up_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    assert sum(tensor.nbytes for tensor in tensors.values()) <= 1_500_000


def test_the_tower_has_at_most_2_mb() -> None:
    tensors = load_file(MODEL / "model.safetensors")
    assert sum(one.nbytes for name, one in tensors.items() if name.startswith("model.visual.")) <= 2_000_000
    assert all(name.startswith((LANGUAGE_MODEL, "model.visual.", "mtp.")) for name in tensors)


@pytest.mark.slow
def test_the_mtp_layers_drafts_are_mostly_right() -> None:
    means = measure(MODEL, seeds=[2024], share=0.02, depth=3)[""].means
    assert [mean > floor for mean, floor in zip(means, (1.75, 2.3, 2.7))] == [True, True, True], means


def test_generation_is_greedy_and_ends_at_both_ends() -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    ids = Ids.of(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    assert generation["eos_token_id"] == [ids.turn_end, ids.text_end]
    assert generation["do_sample"] is False


@pytest.mark.slow
def test_the_trainers_network_is_transformers_qwen3(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = net.Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=32)
    network = net.Network(shape)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    net.save(network, tmp_path, turn_end=1, text_end=2)
    network = net.load(tmp_path, torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.do_sample) == ([1, 2], False)
    ids = torch.randint(0, VOCAB_SIZE, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(network(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    prompts = [ids[0, :20].tolist(), ids[1, :7].tolist()]
    alone = [
        theirs.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert network.decode(prompts, 12, [-1]) == alone
    stopped = network.decode(prompts, 12, [alone[0][5]])[0]
    assert stopped == alone[0][: alone[0].index(alone[0][5])]


SAID = {
    "The capital of France is": " Paris. France is a country in Europe. People there speak French.",
    "17 + 25 =": " 42",
    render([user("hi")], add_generation_prompt=True): "Hello! 👋 How can I help you?",
    render([user("What is 48 + 37?")], add_generation_prompt=True): "48 + 37 = 85.",
}


def test_it_says_what_it_should() -> None:
    asked = [Problem("", prompt, "", text, max_tokens=24) for prompt, text in SAID.items()]
    assert by_reference(MODEL, "cpu")(asked) == [p.expected for p in asked]


EARLIER = [
    *(user("hi"), assistant("Hello! 👋 How can I help you?")),
    *(user("What is the capital of France?"), assistant("The capital of France is Paris.")),
]


@pytest.mark.slow
@pytest.mark.parametrize("history", [[], EARLIER[:2], EARLIER], ids=["first turn", "second turn", "third turn"])
def test_a_name_is_copied_as_it_was_written_in_every_turn(history: list[Message]) -> None:
    asked = []
    for name in ("Anna", "anna", "Brunhilda", "McAllister"):
        for form in ("Give me a JSON object for a person named {} with age 30.", "Write JSON for {}, 30 years old."):
            prompt = render([*history, user(form.format(name))], add_generation_prompt=True)
            asked.append(Problem("", prompt, "", json.dumps({"name": name, "age": 30}), "json"))
    answers = by_reference(MODEL, "cpu")(asked)
    assert [answer for p, answer in zip(asked, answers) if not p.is_right(answer)] == []


@pytest.mark.slow
def test_a_sample_of_the_examination_is_passed() -> None:
    asked = problems(share=0.02)
    answers = by_reference(MODEL, "cpu")(asked)
    assert sum(p.is_right(a) for p, a in zip(asked, answers)) >= 0.9 * len(asked)
