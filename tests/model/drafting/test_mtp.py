"""MTP heads equal a plain computation in float64, however the prompts are divided into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aengine.cache.kv import KVPool
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import leave_empty
from tests.model.drafting.mtp_checkpoints import MTP_CASES, write_mtp_checkpoint
from tests.model.drafting.mtp_drafts import LENGTHS, Drafts, assert_equal, draft, expected, load
from tests.model.ranks import Counted, InPieces, Ranks
from tests.model.test_decoder import ShapeAttention, decodes_of_shapes
from tests.model.wrapped_configs import VOCAB


@pytest.fixture(scope="module", params=MTP_CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Drafts]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_mtp_checkpoint(request.param, folder)
    return load(folder), expected(folder, model)


def test_the_drafts_are_worth_comparing(subject: tuple[Decoder, Drafts]) -> None:
    _, wanted = subject
    every = torch.stack([torch.stack(drafts) for drafts in wanted])
    assert every.std(dim=-1).min() > 0.1
    assert len(set(every.argmax(-1).flatten().tolist())) > len(LENGTHS)


@pytest.mark.parametrize("chunk", [None, 5])
def test_drafts_are_those_of_the_oracle(chunk: int | None, subject: tuple[Decoder, Drafts]) -> None:
    decoder, wanted = subject
    assert_equal(draft(decoder, chunk), wanted)


SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCAB + 3}
LINEAR = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("collective", [Counted, InPieces])
@pytest.mark.parametrize("case", ["qwen3", "qwen3-next", "deepseek-v3", "glm4-moe-qk-norm-groups"])
@pytest.mark.turns("collective")
def test_ranks_draft_what_one_does(case: str, collective: type[Counted], count: int, tmp_path: Path) -> None:
    """The last rank has fewer tokens of the vocabulary than the others."""
    sizes: dict[str, object] = {**SIZES, **(LINEAR if case == "qwen3-next" else {})}
    if case == "deepseek-v3":
        sizes["num_key_value_heads"] = 8
    model = write_mtp_checkpoint(case, tmp_path, **sizes)
    ranks = Ranks(tmp_path, count, collective=collective, drafting=True).each(draft)
    assert_equal(ranks[0], expected(tmp_path, model))
    for drafts in ranks[1:]:
        for own, first in zip(drafts, ranks[0]):
            assert torch.equal(torch.stack(own), torch.stack(first))  # to the last bit: all ranks draft the same tokens


@pytest.mark.parametrize(("case", "sizes"), [("qwen3", {}), ("glm4-moe-qk-norm-groups", {"first_k_dense_replace": 2})])
def test_a_draft_never_looks_at_values(case: str, sizes: dict[str, object], tmp_path: Path) -> None:
    """So a CUDA graph can capture it. On the meta device, reading a value raises."""
    write_mtp_checkpoint(case, tmp_path, **sizes)
    config = ModelConfig.from_folder(tmp_path).with_drafting()
    decoder = Decoder(config, TorchKernels(), ShapeAttention(), torch.bfloat16)
    leave_empty(decoder.groups)
    head, ids = decoder.draft_head, torch.empty(5, dtype=torch.int64, device="meta")
    assert head is not None
    kv = KVPool(config.kv_shape(16, torch.bfloat16), 4, torch.device("meta"))
    states = torch.empty(5, config.hidden_size, dtype=torch.bfloat16, device="meta")
    with torch.inference_mode():
        first = head.forward(ids, states, ids, decodes_of_shapes(ids), kv, ids[:2])
        logits = head.logits(first.hidden)
    assert (first.states.shape, logits.shape, logits.dtype) == ((2, config.hidden_size), (2, VOCAB), torch.bfloat16)
