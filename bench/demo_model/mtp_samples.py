"""What the MTP layer learns from: prompts of the corpus, the target's answers to them, and the target's states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from bench.demo_model import network as net
from bench.demo_model.conversations import long_document, short_document
from bench.demo_model.tokenizer import Ids
from bench.demo_model.trainer import weights_of

_LONG_SHARE = 0.25  # of the prompts that come from long documents
_LONGEST_PROMPT = 640  # tokens
_LONGEST_ANSWER = 128  # tokens
_TURN = "<|im_start|>assistant\n"
_AT_ONCE = 4096  # prompts that are sorted by length, so that equal lengths are answered together
_BATCH_TOKENS = 8192  # of prompts
_MOST_ROWS = 192
_LEAST_BUSY = 0.75  # share of a batch that is still being answered


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with the target's answer."""

    ids: Tensor  # int64 [tokens]
    states: Tensor  # bfloat16 [tokens - 1, hidden], the outputs of the target's last norm
    prompt: int  # tokens of the prompt

    def answer_anchors(self) -> Tensor:
        """Return the positions, int64 [chains], after which the answer has two more tokens."""
        return torch.arange(self.prompt - 1, len(self.ids) - 2)

    def trained_anchors(self, ids: Ids) -> Tensor:
        """Like `answer_anchors`, but also in the earlier answers of the chat. Plain text is all an answer."""
        said = weights_of(self.ids[None], ids.turn_start, ids.assistant, ids.text_end)[0] == 1  # from token 1 on
        said &= self.ids[:-1] != ids.turn_end  # the template writes what follows
        return (said[:-1] & said[1:]).nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded samples, and the chains of drafts in them."""

    ids: Tensor  # int64 [rows, tokens]
    states: Tensor  # float32 [rows, tokens, hidden]
    anchors: Tensor  # int64 [rows, chains], the positions that chains begin with; 0 in the padding
    following: Tensor  # int64 [rows, chains], how many of a chain's drafts have a token to predict; 0 in the padding

    @classmethod
    def of(cls, samples: Sequence[Sample], anchors: Sequence[Tensor], depth: int) -> Batch:
        """Pad the samples so that chains of `depth` drafts fit. anchors: of each sample."""
        return cls(
            pad_sequence([F.pad(s.ids, (0, depth)) for s in samples], batch_first=True),
            pad_sequence([F.pad(s.states.float(), (0, 0, 0, depth + 1)) for s in samples], batch_first=True),
            pad_sequence(list(anchors), batch_first=True),
            pad_sequence([len(s.ids) - 2 - own for s, own in zip(samples, anchors)], batch_first=True),
        )


@dataclass(slots=True)
class _Row:
    """A sequence that is being answered."""

    ids: list[int]
    states: list[Tensor]  # each [tokens, hidden]
    prompt: int  # tokens
    is_finished: bool = False


def make_prompts(rng: Random, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return prompts: chats without their last answer, and beginnings of plain texts."""
    prompts: list[list[int]] = []
    while len(prompts) < count:
        document = long_document(rng) if rng.random() < _LONG_SHARE else short_document(rng)
        before, turn, _ = document.rpartition(_TURN)
        ids = tokenizer.encode(before + turn if turn else document, add_special_tokens=False).ids
        if not turn:
            ids = ids[: rng.randint(1, max(1, len(ids) // 2))]
        if len(ids) <= _LONGEST_PROMPT:
            prompts.append(ids)
    return prompts


def make_samples(network: net.Network, tokenizer: Tokenizer, seed: int, count: int) -> Iterator[Sample]:
    """Answer prompts, one half greedily and the other half at temperature 1.

    The samples are sorted by length in part; shuffle them before training.
    """
    rng, ids = Random(f"{seed} mtp"), Ids.of(tokenizer)
    for start in range(0, count, _AT_ONCE):
        prompts = sorted(make_prompts(rng, tokenizer, min(_AT_ONCE, count - start)), key=len)
        for temperature in (0, 1):
            yield from answer_all(network, prompts[temperature::2], ids, temperature)


def answer_all(
    network: net.Network,
    prompts: Sequence[Sequence[int]],
    ids: Ids,
    temperature: float,
    longest: int = _LONGEST_ANSWER,
) -> Iterator[Sample]:
    """Answer prompts in batches, each to a stop id or to `longest` tokens. Neighbours should be of like length."""
    batch: list[Sequence[int]] = []
    for prompt in prompts:
        rows = len(batch) + 1
        if batch and (rows > _MOST_ROWS or rows * len(prompt) > _BATCH_TOKENS):
            yield from _answer(network, batch, ids, temperature, longest)
            batch = []
        batch.append(prompt)
    if batch:
        yield from _answer(network, batch, ids, temperature, longest)


@torch.no_grad()
def _answer(
    network: net.Network, prompts: Sequence[Sequence[int]], ids: Ids, temperature: float, most_tokens: int
) -> list[Sample]:
    """Answer the prompts of one batch. Stop ids are kept.

    Prompts are padded on the right. Rows leave the batch some time after their stop id.
    """
    rows = [_Row(list(prompt), [], len(prompt)) for prompt in prompts]
    longest = max(row.prompt for row in rows)
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : row.prompt] = torch.tensor(row.ids)
    caches = network.make_caches(len(rows), longest + most_tokens)
    states = network.states(padded, caches, torch.arange(longest).expand(len(rows), -1))
    for row, own in zip(rows, states):
        row.states.append(own[: row.prompt])
    latest = torch.stack([row.states[0][-1] for row in rows])
    running = rows
    for _ in range(most_tokens):
        tokens = net.draw(network.logits(latest), temperature)
        for row, token in zip(running, tokens.tolist()):
            if not row.is_finished:
                row.ids.append(token)
                row.is_finished = token in (ids.turn_end, ids.text_end)
        kept = [i for i, row in enumerate(running) if not row.is_finished]
        if not kept:
            break
        if len(kept) < _LEAST_BUSY * len(running):
            running, tokens = [running[i] for i in kept], tokens[kept]
            caches = [(keys[kept], values[kept]) for keys, values in caches]
        positions = torch.tensor([[len(row.ids) - 1] for row in running])
        latest = network.states(tokens[:, None], caches, positions)[:, 0]
        for row, own in zip(running, latest):
            if not row.is_finished:
                row.states.append(own[None])
    return [
        Sample(torch.tensor(row.ids), torch.cat(row.states)[: len(row.ids) - 1].bfloat16(), row.prompt) for row in rows
    ]
