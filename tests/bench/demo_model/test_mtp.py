"""The MTP layer drafts as a plain loop would, learns from the target's answers, and is added to the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo_model import mtp as draft
from bench.demo_model import network as net
from bench.demo_model.acceptance import right_drafts, steps_of
from bench.demo_model.evaluate import MODEL
from bench.demo_model.mtp_samples import Batch, Sample, answer_all, make_prompts, make_samples
from bench.demo_model.mtp_trainer import batches, train
from bench.demo_model.tokenizer import Ids

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
IDS = Ids.of(TOKENIZER)
SHAPE = net.Shape(vocab_size=10, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8)


@pytest.fixture
def pair() -> tuple[net.Network, draft.MTP]:
    """A small target and a layer for it, both random."""
    torch.manual_seed(0)
    network, mtp = net.Network(SHAPE), draft.MTP(SHAPE, 40)
    for parameter in (*network.parameters(), *mtp.parameters()):
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.3)
    return network.requires_grad_(False), mtp.requires_grad_(False)


def run_layer(mtp: draft.MTP, inputs: list[Tensor]) -> Tensor:
    """The output after the last of the layer's inputs, with the target's own attention over all of them."""
    x = torch.stack(inputs)[None]
    table = mtp.rope[:, torch.arange(len(inputs))[None]][:, :, None]
    return mtp.norm(mtp.layer(x, table, None, None))[0, -1]


def make_input(network: net.Network, mtp: draft.MTP, token: int, state: Tensor) -> Tensor:
    embedded = network.embed_tokens.weight[token]
    return mtp.fc(torch.cat((mtp.pre_fc_norm_embedding(embedded), mtp.pre_fc_norm_hidden(state))))


def draft_tokens(network: net.Network, mtp: draft.MTP, ids: list[int], count: int) -> list[int]:
    """Draft tokens after `ids`, one after the other."""
    states = list(network.states(torch.tensor([ids[:-1]]))[0])
    inputs = [make_input(network, mtp, token, state) for token, state in zip(ids[1:], states)]
    drafts: list[int] = []
    while True:
        output = run_layer(mtp, inputs)
        drafts.append(int(network.logits(output).argmax()))
        if len(drafts) == count:
            return drafts
        inputs.append(make_input(network, mtp, drafts[-1], output))


def test_chains_give_what_a_row_by_row_loop_gives(pair: tuple[net.Network, draft.MTP]) -> None:
    network, mtp = pair
    ids = torch.randint(0, SHAPE.vocab_size, (1, 14))
    states = network.states(ids)
    outputs = mtp(network.embed_tokens(ids), states, torch.tensor([[3, 9, 0]]), 3)
    for chain, anchor in enumerate((3, 9, 0)):
        inputs = [make_input(network, mtp, int(ids[0, p + 1]), states[0, p]) for p in range(anchor + 1)]
        for step in range(3):
            expected = run_layer(mtp, inputs)
            torch.testing.assert_close(outputs[step][0, chain], expected)
            inputs.append(make_input(network, mtp, int(ids[0, anchor + step + 2]), expected))


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_steps_are_those_of_speculative_decoding(pair: tuple[net.Network, draft.MTP], drafts: int) -> None:
    network, mtp = pair
    ids = Ids(text_end=8, turn_start=7, turn_end=9, assistant=6)
    network.embed_tokens.weight[[8, 9]] = 0.0  # no answer ends early
    mtp.fc.weight.copy_(torch.eye(64)[:32])  # it drafts the same token again, which is sometimes right
    mtp.layer.self_attn.o_proj.weight *= 0.1
    mtp.layer.mlp.down_proj.weight *= 0.1
    prompts = [[1, 2, 3], [4, 5, 0, 1], [5, 5, 2, 3]]
    samples = list(answer_all(network, prompts, ids, temperature=0.0, longest=24))
    longest: list[int] = []
    for prompt, sample, right in zip(prompts, samples, right_drafts(network, mtp, samples, drafts)):
        answer = sample.ids.tolist()
        kept: list[int] = []
        done = len(prompt) + 1
        while done < len(answer):
            drafted = draft_tokens(network, mtp, answer[:done], drafts)
            rest = answer[done:]
            count = next((i for i, token in enumerate(drafted) if rest[i : i + 1] != [token]), drafts)
            kept.append(min(count + 1, len(rest)))
            done += kept[-1]
        assert steps_of(right, drafts) == kept
        longest.append(max(kept))
    assert max(longest) > 1


def test_a_step_keeps_the_drafts_before_the_first_wrong_one_and_one_token_more() -> None:
    right = [2, 0, 3, 1, 1, 0]
    assert steps_of(right, 1) == [2, 2, 2]
    assert steps_of(right, 2) == [3, 2, 1]
    assert steps_of(right, 4) == [3, 2, 1]
    assert steps_of([], 4) == []


def test_prompts_end_before_the_last_answer() -> None:
    texts = [TOKENIZER.decode(ids, skip_special_tokens=False) for ids in make_prompts(Random(1), TOKENIZER, 40)]
    chats = [text for text in texts if "<|im_start|>" in text]
    assert len(chats) > 20
    assert len(texts) > len(chats)
    assert all(text.endswith("<|im_start|>assistant\n") for text in chats)
    assert max(text.count("<|im_start|>assistant\n") for text in chats) > 1


def make_few_samples(count: int) -> list[Sample]:
    torch.manual_seed(0)
    return list(make_samples(net.load(MODEL, torch.device("cpu")), TOKENIZER, seed=3, count=count))


def test_samples_hold_the_targets_answers_and_states() -> None:
    network = net.load(MODEL, torch.device("cpu"))
    prompts = [TOKENIZER.encode(text).ids for text in ("The capital of France is", "17 + 25 =")]
    samples = list(answer_all(network, prompts, IDS, temperature=0.0))
    answers = network.decode(prompts, 128, [IDS.turn_end, IDS.text_end])
    for prompt, answer, sample in zip(prompts, answers, samples):
        ids = sample.ids.tolist()
        assert ids[:-1] == prompt + answer
        assert ids[-1] in (IDS.turn_end, IDS.text_end)
        expected = network.states(sample.ids[None, :-1])[0]
        torch.testing.assert_close(sample.states.float(), expected.detach(), atol=2e-2, rtol=2e-2)


def test_chains_are_trained_where_the_model_writes_two_tokens() -> None:
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOne two.<|im_end|>"
    ids = torch.tensor(TOKENIZER.encode(f"{turn}\n{turn}", add_special_tokens=False).ids)
    sample = Sample(ids, torch.zeros(len(ids) - 1, 8), prompt=0)
    second = [TOKENIZER.decode([i]) for i in ids[sample.trained_anchors(IDS) + 2].tolist()]
    answer = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("One two.<|im_end|>", add_special_tokens=False).ids]
    assert second == 2 * answer[1:]


def test_a_batch_of_chains_counts_the_tokens_after_each() -> None:
    samples = [Sample(torch.arange(n), torch.ones(n - 1, 8), prompt=2) for n in (5, 7)]
    batch = Batch.of(samples, [sample.answer_anchors() for sample in samples], depth=3)
    assert batch.anchors.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert batch.following.tolist() == [[2, 1, 0, 0], [4, 3, 2, 1]]


@pytest.mark.slow
def test_training_is_repeatable_and_leaves_the_target_alone() -> None:
    network = net.load(MODEL, torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    samples = make_few_samples(12)
    trained = []
    for _ in range(2):
        torch.manual_seed(1)
        mtp = draft.MTP(network.shape, 64)
        fresh = [parameter.detach().clone() for parameter in mtp.parameters()]
        assert train(network, mtp, batches(samples, IDS, 64, Random(0)), steps=3, minutes=None, peak=1e-2) == 3
        assert all(not torch.equal(old, new) for old, new in zip(fresh, mtp.parameters()))
        trained.append([parameter.detach() for parameter in mtp.parameters()])
    for first, second in zip(*trained):
        torch.testing.assert_close(first, second)
    for old, new in zip(before, network.parameters()):
        assert torch.equal(old, new)


def test_the_layer_is_added_to_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = net.Network(SHAPE)
    net.save(network, tmp_path, turn_end=9, text_end=8)
    before = load_file(tmp_path / "model.safetensors")
    for size in (40, 24):  # the second layer replaces the first
        mtp = draft.MTP(SHAPE, size)
        draft.save(mtp, tmp_path)
        after = load_file(tmp_path / "model.safetensors")
        assert {name for name in after if not name.startswith("mtp.")} == set(before)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert (config["mtp_num_hidden_layers"], config["mtp_intermediate_size"]) == (1, size)
        for saved, kept in zip(draft.load(tmp_path, SHAPE).parameters(), mtp.parameters()):
            torch.testing.assert_close(saved, kept.bfloat16().float())
        for saved, kept in zip(net.load(tmp_path, torch.device("cpu")).parameters(), network.parameters()):
            torch.testing.assert_close(saved, kept.bfloat16().float())
