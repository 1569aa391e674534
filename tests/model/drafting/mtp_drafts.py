"""Drafts of an MTP head: those of the package, and those of a plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.lora.room import LoraRoom
from tests.model.drafting.mtp_oracle import Oracle
from tests.model.drafting.steps import Sequences
from tests.model.loading_one import load_model
from tests.model.wrapped_configs import VOCAB

LENGTHS = (1, 3, 11, 17)
DRAFTS = 3
Drafts = list[list[Tensor]]  # logits [vocab] of each draft of each sequence


def prompts() -> list[list[int]]:
    """Return prompts with one more token each: the one that was sampled."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (length + 1,), generator=generator).tolist() for length in LENGTHS]


def expected(folder: Path, model: PreTrainedModel) -> Drafts:
    oracle, found = Oracle(folder), []
    for tokens in prompts():
        with torch.no_grad():
            states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0].double()
        next_ids, drafts = tokens[1:], []
        for _ in range(DRAFTS):
            logits, state = oracle.draft(next_ids, states)
            drafts.append(logits)
            next_ids, states = [*next_ids, int(logits.argmax())], torch.cat((states, state[None]))
        found.append(drafts)
    return found


@torch.inference_mode()
def draft(decoder: Decoder, chunk: int | None = None) -> Drafts:
    """Compute all prompts at once, each in pieces of `chunk` tokens at most, and draft after the last piece."""
    head, tokens = decoder.draft_head, prompts()
    assert head is not None
    sequences = Sequences(decoder, len(tokens))
    found: Drafts = [[] for _ in tokens]
    done = [0] * len(tokens)
    last: list[Tensor] = [torch.empty(0)] * len(tokens)  # the state after each prompt
    while any(start < length for start, length in zip(done, LENGTHS)):
        spans = [range(start, min(length, start + (chunk or length))) for start, length in zip(done, LENGTHS)]
        positions, batch = sequences.batch(spans)
        known = [token for sequence, span in zip(tokens, spans) for token in sequence[span.start : span.stop]]
        following = [
            token for sequence, span in zip(tokens, spans) for token in sequence[span.start + 1 : span.stop + 1]
        ]
        ids, next_ids = torch.tensor(known), torch.tensor(following)
        hidden = decoder.forward(ids, positions, batch, sequences.kv, states=sequences.states(spans, positions))
        ending = [i for i, span in enumerate(spans) if span and span.stop == LENGTHS[i]]
        wanted = batch.query_starts[1:].long()[ending] - 1
        drafted = head.forward(next_ids, hidden, positions, batch, sequences.kv, wanted)
        for i, logits, state in zip(ending, head.logits(drafted.hidden), drafted.states, strict=True):
            found[i].append(logits)
            last[i] = state
        done = [span.stop for span in spans]
    states = torch.stack(last)
    for i in range(DRAFTS - 1):
        spans = [range(length + i, length + i + 1) for length in LENGTHS]
        positions, batch = sequences.batch(spans, decodes=True)
        next_ids = torch.stack([drafts[-1].argmax() for drafts in found])
        drafted = head.forward(next_ids, states, positions, batch, sequences.kv, recycled=True)
        for drafts, logits in zip(found, head.logits(drafted.hidden)):
            drafts.append(logits)
        states = drafted.states
    return found


def load(folder: Path, load_format: Literal["auto", "dummy"] = "auto", lora: LoraRoom | None = None) -> Decoder:
    """Load a model with its head."""
    return load_model(
        folder,
        ModelConfig.from_folder(folder).with_drafting().with_lora(lora),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=TorchAttention(),
        load_format=load_format,
    )


def assert_equal(found: Drafts, wanted: Drafts) -> None:
    for drafts, others in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.stack(drafts).double(), torch.stack(others).double(), atol=2e-4, rtol=0)
