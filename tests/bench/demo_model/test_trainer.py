"""The trainer learns, weighs tokens as it says, and reads the same stream whatever the number of processes."""

from __future__ import annotations

from contextlib import closing
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bench.demo_model import network as net
from bench.demo_model.evaluate import MODEL
from bench.demo_model.stream import LONG, SHORT, make_rows, make_stream
from bench.demo_model.tokenizer import Ids
from bench.demo_model.trainer import batches, learning_rate, train, weights_of

FILE = MODEL / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
IDS = Ids.of(TOKENIZER)


@pytest.mark.slow
def test_the_stream_does_not_depend_on_the_processes() -> None:
    streams = []
    for processes in (1, 2):
        with closing(make_stream(FILE, seed=1, processes=processes, tokens=4 * SHORT)) as shards:
            streams.append([next(shards) for _ in range(2)])
    for mine, theirs in zip(*streams):
        for a, b in zip(mine, theirs):
            np.testing.assert_array_equal(a, b)
    (short, long), (later, _) = streams[0]
    assert short.shape == (4, SHORT + 1)
    assert long.shape == (1, LONG + 1)
    assert not np.array_equal(short, later)


def test_rows_begin_with_a_document_and_differ_between_shards() -> None:
    first, second = (make_rows(str(FILE), 0, shard, SHORT, 8) for shard in (0, 1))
    assert not np.array_equal(first, second)
    for row in first:
        text = TOKENIZER.decode(row.tolist(), skip_special_tokens=False)
        assert text.startswith("<|im_start|>") or "<|im_start|>" not in text.partition("<|endoftext|>")[0]


def _said(text: str) -> str:
    ids = torch.tensor([TOKENIZER.encode(text, add_special_tokens=False).ids])
    weights = weights_of(ids, IDS.turn_start, IDS.assistant, IDS.text_end)[0]
    kept = [token for token, weight in zip(ids[0, 1:].tolist(), weights.tolist()) if weight == 1]
    return str(TOKENIZER.decode(kept, skip_special_tokens=False))


def test_only_what_the_model_says_counts_fully() -> None:
    chat = "<|im_start|>user\nassistant?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    assert _said(chat + chat + "<|endoftext|>") == "Yes.<|im_end|>\nYes.<|im_end|>\n<|endoftext|>"
    assert _said("<|endoftext|>Plain text.<|endoftext|>" + chat) == "Plain text.<|endoftext|>Yes.<|im_end|>\n"


def test_batches_take_short_and_long_rows_in_turn() -> None:
    rows = np.arange(12, dtype=np.uint16).reshape(4, 3), np.arange(100, 110, dtype=np.uint16).reshape(2, 5)
    stream = batches([rows, rows], 4, torch.device("cpu"))
    short, long = [[0, 1, 2], [3, 4, 5]], [[100, 101, 102, 103, 104]]
    assert [batch.tolist() for batch, _ in zip(stream, range(3))] == [short, long, [[6, 7, 8], [9, 10, 11]]]


def test_the_rate_rises_then_falls() -> None:
    assert learning_rate(0.0, 0, 1.0) < 0.01
    assert learning_rate(0.1, 1000, 1.0) > learning_rate(0.9, 9000, 1.0)
    assert 0 < learning_rate(1.0, 10_000, 1.0) <= 0.01


def _train(folder: Path) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = net.Shape(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    network = net.Network(shape)
    short, long = (make_rows(str(FILE), 0, 0, length, 4)[:, :129] for length in (SHORT, LONG))
    stream = batches(repeat((short, long)), 256, torch.device("cpu"))
    before = [p.detach().clone() for p in network.parameters()]
    assert train(network, stream, IDS, steps=4, minutes=None, peak=1e-2) == 4
    assert all(not torch.equal(old, new) for old, new in zip(before, network.parameters()))
    net.save(network, folder, turn_end=IDS.turn_end, text_end=IDS.text_end)
    loaded = net.load(folder, torch.device("cpu"))
    for saved, kept in zip(loaded.parameters(), network.parameters()):
        torch.testing.assert_close(saved, kept.bfloat16().float())
    return [p.detach() for p in network.parameters()]


@pytest.mark.slow
def test_training_is_repeatable_and_saves_what_it_learned(tmp_path: Path) -> None:
    for first, second in zip(_train(tmp_path), _train(tmp_path)):
        torch.testing.assert_close(first, second)
