"""Batches that train the tower: pictures of one size, and questions about each.

The questions about a picture are branches. They follow the picture's tokens, and none sees another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, multiprocessing

from bench.demo_model.chat_format import END_OF_TURN
from bench.demo_model.conversations import fact_turn
from bench.demo_model.picture_questions import ask
from bench.demo_model.pictures import COLOURS, DIGITS, SHAPES, Picture, choose_size, draw
from bench.demo_model.tower import TowerShape, grid_of, patches_of

KINDS = (*SHAPES, *DIGITS)
_FACTS = 0.03  # of the questions have nothing to do with the picture
_IGNORED = -100  # the target at places that are not trained


@dataclass(frozen=True, slots=True)
class Pictures:
    """The patches of pictures of one size, and what stands in each token."""

    patches: Tensor  # [pictures, patches, 3 * patch * patch] uint8
    rows: int  # of tokens
    columns: int
    kinds: Tensor  # [pictures, tokens] int64: 1 + the index in `KINDS` where the centre of a thing is, else 0
    colours: Tensor  # the same for colours, -100 at other tokens

    def to(self, device: torch.device) -> Pictures:
        """Return them on a device."""
        tensors = (one.to(device) for one in (self.patches, self.kinds, self.colours))
        patches, kinds, colours = tensors
        return Pictures(patches, self.rows, self.columns, kinds, colours)


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures, and chats about them. A chat is the ids before a picture, the picture's tokens, and its own ids."""

    pictures: Pictures
    before: Tensor  # [tokens] int64: the ids before a picture
    picture: Tensor  # [chats] int64: the picture of each chat
    ids: Tensor  # [chats, tokens] int64: those after the picture, padded on the right
    there: Tensor  # [chats, tokens] bool: False for padding
    targets: Tensor  # [chats, tokens] int64: the next token at places that an answer follows, else -100

    def to(self, device: torch.device) -> Batch:
        """Return it on a device."""
        tensors = (self.before, self.picture, self.ids, self.there, self.targets)
        return Batch(self.pictures.to(device), *(one.to(device) for one in tensors))


def draw_pictures(count: int, shape: TowerShape, rng: Random) -> tuple[list[Picture], Pictures]:
    """Draw pictures whose tokens have the same rows and columns."""
    grid = grid_of(*choose_size(rng), shape)
    drawn = []
    for _ in range(count):
        while grid_of(*(size := choose_size(rng)), shape) != grid:
            pass
        drawn.append(draw(rng, size))
    rows, columns = grid
    kinds = torch.zeros(count, rows * columns, dtype=torch.int64)
    colours = torch.full_like(kinds, _IGNORED)
    for i, picture in enumerate(drawn):
        for thing in picture.things:
            token = int(thing.y * rows) * columns + int(thing.x * columns)
            kinds[i, token] = 1 + KINDS.index(thing.kind)
            colours[i, token] = list(COLOURS).index(thing.colour)
    patches = torch.from_numpy(np.stack([patches_of(picture.image, shape)[0] for picture in drawn]))
    return drawn, Pictures(patches, rows, columns, kinds, colours)


def make_batch(count: int, chats: int, shape: TowerShape, tokenizer: Tokenizer, rng: Random) -> Batch:
    """Draw pictures, and make several chats about each. All chats of a batch have as many turns."""
    drawn, pictures = draw_pictures(count, shape, rng)
    turns = 1 if rng.random() < 0.92 else 2
    rows = [_chat(picture, turns, tokenizer, rng) for picture in drawn for _ in range(chats)]
    longest = max((len(ids) for ids, _ in rows), default=0)
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows], dtype=torch.int64)
    there = torch.tensor([[True] * len(ids) + [False] * (longest - len(ids)) for ids, _ in rows])
    targets = torch.tensor([[*targets, *[_IGNORED] * (longest - len(targets))] for _, targets in rows])
    before = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
    picture = torch.arange(count).repeat_interleave(chats)
    return Batch(pictures, torch.tensor(before), picture, ids, there, targets)


@dataclass(frozen=True, slots=True)
class Job:
    """What the batches of one part of the training have in common. chats: about each picture; 0: only pictures."""

    part: str
    pictures: int
    chats: int
    shape: TowerShape
    tokenizer_file: str
    seed: int

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, which depends on nothing else."""
        torch.set_num_threads(1)
        tokenizer = Tokenizer.from_file(self.tokenizer_file)
        return make_batch(self.pictures, self.chats, self.shape, tokenizer, Random(f"{self.seed} {self.part} {step}"))


def stream(job: Job, steps: range, processes: int) -> Iterator[Batch]:
    """Yield the batches of steps. With several processes, these work ahead."""
    if processes <= 1:
        yield from map(job.batch, steps)
        return
    multiprocessing.set_sharing_strategy("file_system")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting = iter(steps)
        ahead = deque(pool.apply_async(job.batch, (step,)) for step in islice(waiting, 2 * processes))
        while ahead:
            yield ahead.popleft().get()
            ahead.extend(pool.apply_async(job.batch, (step,)) for step in islice(waiting, 1))


def _chat(picture: Picture, turns: int, tokenizer: Tokenizer, rng: Random) -> tuple[list[int], list[int]]:
    """Return the ids after the picture, without the last one, and the target at each."""
    ids: list[int] = []
    targets: list[int] = []
    for turn in range(turns):
        question, answer = _question(picture, rng)
        begin = "\n<|im_start|>user\n" if turn else ""
        text = f"{begin}{question}{END_OF_TURN}\n<|im_start|>assistant\n"
        asked = tokenizer.encode(text, add_special_tokens=False).ids
        answered = tokenizer.encode(f"{answer}{END_OF_TURN}", add_special_tokens=False).ids
        ids += asked + answered
        targets += [_IGNORED] * len(asked) + answered
    return ids[:-1], targets[1:]


def _question(picture: Picture, rng: Random) -> tuple[str, str]:
    if rng.random() < _FACTS:
        return fact_turn(rng)
    question = ask(picture, rng)
    if question is None:
        raise RuntimeError("a picture without a question: it has no things")
    return question.text, question.answer
