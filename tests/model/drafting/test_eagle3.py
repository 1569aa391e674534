"""An EAGLE-3 head drafts what its description says, computed in float64 one token at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.drafting.base import TapStates
from aengine.model.drafting.eagle3_config import read_eagle3
from aengine.model.groups import leave_empty
from aengine.model.loading.heads import build_head
from aengine.model.loading.load import Placement
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.eagle3_drafts import Drafter, Drafting, head_of, random_states
from tests.model.drafting.eagle3_reference import HeadSettings, Reference
from tests.model.drafting.head_reference import make_tensors, write_head
from tests.model.ranks import Counted, InPieces, Ranks
from tests.model.test_decoder import META, ShapeAttention

DRAFTS = 4
LENGTHS = (1, 5, 11)
_SPECULATORS = HeadSettings(speculators=True, norm_before_residual=True)
HEADS = {
    "plain": HeadSettings(),
    "plain-named-as-in-a-model": HeadSettings(prefix="model.", own_embedding=True),
    "plain-with-biases": HeadSettings(bias=True, norm_before_residual=True),
    "plain-flags-in-a-section": HeadSettings(in_section=True, norm_before_fc=True, norm_before_residual=True),
    "plain-narrower-than-the-target": HeadSettings(hidden=48, own_embedding=True, norm_before_fc=True),
    "plain-over-every-token": HeadSettings(draft_vocab=96, taps=(0, 4)),
    "speculators": _SPECULATORS,
    "speculators-norm-after-the-residual": replace(_SPECULATORS, norm_before_residual=False, norm_output=True),
    "speculators-two-layers": replace(_SPECULATORS, layers=2, norm_output=True, fc_norm=True),
    "speculators-two-layers-shared-ends": replace(_SPECULATORS, layers=2, draft_vocab=96, own_head=False),
    "speculators-qwen3": replace(_SPECULATORS, qk_norm=True, fc_norm=True, own_embedding=True),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers that does not share its embedding with its output matrix."""
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint("llama2", folder, num_hidden_layers=4, vocab_size=96, tie_word_embeddings=False)
    return folder


def load(target_folder: Path, settings: HeadSettings, folder: Path, tensors: dict[str, Tensor]) -> Decoder:
    return Ranks(target_folder, 1, eagle3=write_head(settings, folder, tensors)).decoders[0]


def check(settings: HeadSettings, tensors: dict[str, Tensor], target: Decoder, drafting: list[Drafting]) -> None:
    """Compare the logits of all drafts with the reference, which continues with the same drafts."""
    every = torch.arange(settings.target_vocab)
    embedding = target.embed(every)
    output = target.logits(torch.eye(settings.target_hidden, dtype=target.dtype)).T
    for one in drafting:
        sequence = Reference(settings, tensors, embedding, output)
        for next_id, state in zip(one.next_ids, one.states):
            logits, recycled = sequence.step(next_id, state, recycled=False)
        for i, drawn in enumerate(one.logits):
            torch.testing.assert_close(drawn.double(), logits, atol=1e-4, rtol=1e-4)
            ids = every if "d2t" not in tensors else tensors["d2t"] + torch.arange(settings.draft_vocab)
            assert one.drafts[i] == ids[int(drawn.argmax())]
            logits, recycled = sequence.step(one.drafts[i], recycled, recycled=True)


@pytest.mark.parametrize("chunk", [100, 3])
@pytest.mark.parametrize("case", HEADS)
def test_drafts_after_prompts(case: str, chunk: int, target_folder: Path, tmp_path: Path) -> None:
    """chunk: prompts are computed in one step, or in steps of three tokens."""
    settings, tensors = HEADS[case], make_tensors(HEADS[case])
    decoder, drafting = load(target_folder, settings, tmp_path, tensors), random_states(settings, LENGTHS)
    Drafter(decoder, drafting).draft(DRAFTS, chunk)
    assert [len(one.drafts) for one in drafting] == [DRAFTS] * len(LENGTHS)
    check(settings, tensors, decoder, drafting)


def test_every_token_may_be_wanted(target_folder: Path, tmp_path: Path) -> None:
    """Then the results are in the order of the tokens."""
    settings = HEADS["speculators-two-layers"]
    decoder = load(target_folder, settings, tmp_path, make_tensors(settings))
    drafter = Drafter(decoder, random_states(settings, (6,)))
    positions, batch = drafter.sequences.batch([range(6)])
    [one], kv = drafter.drafting, drafter.sequences.kv
    ids = torch.tensor(one.next_ids)
    with torch.inference_mode():
        every = drafter.head.forward(ids, one.states, positions, batch, kv)
        some = drafter.head.forward(ids, one.states, positions, batch, kv, torch.tensor([4, 1]))
    for of_all, of_some in ((every.hidden, some.hidden), (every.states, some.states)):
        torch.testing.assert_close(of_all[[4, 1]], of_some)


def test_it_reads_the_states_that_the_target_hands_out(target_folder: Path, tmp_path: Path) -> None:
    """One step runs the target and then a head with other heads. Its layers follow the target's in the pool."""
    settings = HeadSettings(taps=(1, 2, 4), heads=6, kv_heads=3, head_dim=8, norm_before_residual=True)
    tensors = make_tensors(settings)
    decoder = load(target_folder, settings, tmp_path, tensors)
    tokens = [5, 90, 3, 3, 64, 17, 80]
    one = Drafting(torch.full((len(tokens), 3 * settings.target_hidden), float("nan")), [*tokens[1:], 8])
    drafter = Drafter(decoder, [one])
    positions, batch = drafter.sequences.batch([range(len(tokens))])
    kv, last = drafter.sequences.kv, torch.tensor([len(tokens) - 1])
    with torch.inference_mode():
        taps = TapStates(settings.taps, one.states)
        before = decoder.forward(torch.tensor(tokens), positions, batch, kv, taps=taps)
        drafter.run([one], torch.tensor(one.next_ids), one.states, positions, batch, last)
        one.computed = len(tokens)
        for _ in range(DRAFTS - 1):
            drafter.recycle()
        # The target's keys and values are as they were.
        after = decoder.forward(torch.tensor(tokens[-1:]), *drafter.sequences.batch([range(6, 7)], True), kv)
    check(settings, tensors, decoder, [one])
    assert drafter.head.taps.layers == settings.taps
    torch.testing.assert_close(after, before[-1:])


@pytest.mark.parametrize("collective", [Counted, InPieces])
@pytest.mark.parametrize("case", ["plain", "speculators-two-layers", "speculators-two-layers-shared-ends", "whole"])
def test_ranks_draft_the_same(case: str, collective: type[Counted], target_folder: Path, tmp_path: Path) -> None:
    """whole: three heads cannot be divided between two ranks, so each rank has the whole head."""
    settings = (HEADS | {"whole": HeadSettings(heads=3, kv_heads=3, own_embedding=True)})[case]
    tensors = make_tensors(settings)
    ranks = Ranks(target_folder, 2, collective=collective, eagle3=write_head(settings, tmp_path, tensors))

    def draft(decoder: Decoder) -> list[Drafting]:
        drafting = random_states(settings, LENGTHS)
        Drafter(decoder, drafting).draft(DRAFTS, chunk=6)
        check(settings, tensors, decoder, drafting)
        return drafting

    first, second = ranks.each(draft)
    assert [one.drafts for one in first] == [one.drafts for one in second]
    kv_heads = 3 if case == "whole" else 1
    kept = [[layer.heads for layer in head_of(decoder).kv_layers] for decoder in ranks.decoders]
    assert kept == [[kv_heads] * settings.layers] * 2


def test_it_has_the_dtype_of_the_target(target_folder: Path, tmp_path: Path) -> None:
    settings = HEADS["speculators-qwen3"]
    write_head(settings, tmp_path)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        drafting = random_states(settings, LENGTHS)
        for one in drafting:
            one.states = one.states.to(dtype)
        Drafter(Ranks(target_folder, 1, dtype, eagle3=tmp_path).decoders[0], drafting).draft(1)
        found.append(torch.cat([one.logits[0] for one in drafting]))
        assert found[-1].dtype == dtype
    torch.testing.assert_close(found[1].float(), found[0], atol=0.1, rtol=0)


def test_keys_and_values_may_be_fp8(target_folder: Path, tmp_path: Path) -> None:
    settings = HEADS["speculators-two-layers"]
    write_head(settings, tmp_path)
    found = []
    for kv_dtype in (None, torch.float8_e4m3fn):
        drafting = random_states(settings, LENGTHS)
        Drafter(Ranks(target_folder, 1, eagle3=tmp_path, kv_dtype=kv_dtype).decoders[0], drafting).draft(1)
        found.append(torch.cat([one.logits[0] for one in drafting]))
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], found[0], atol=0.2, rtol=0)


def test_shifted_positions_are_shifted_back(tmp_path: Path) -> None:
    """Sequences within longrope's trained context have shifted positions. Layers of a head rotate by the plain ones."""
    write_checkpoint("phi3-beyond-the-trained-context", tmp_path / "target", vocab_size=96, num_hidden_layers=4)
    settings = HEADS["speculators-two-layers"]
    decoder = load(tmp_path / "target", settings, tmp_path / "head", make_tensors(settings))
    drafter = Drafter(decoder, random_states(settings, (6,)))
    positions, batch = drafter.sequences.batch([range(6)])
    [one], kv = drafter.drafting, drafter.sequences.kv
    ids = torch.tensor(one.next_ids)
    assert decoder.near_shift > 0
    with torch.inference_mode():
        plain = drafter.head.forward(ids, one.states, positions, batch, kv)
        shifted = drafter.head.forward(ids, one.states, positions + decoder.near_shift, batch, kv)
    torch.testing.assert_close(shifted.hidden, plain.hidden)


def test_a_run_reads_no_value(target_folder: Path, tmp_path: Path) -> None:
    """So a CUDA graph can capture it, and its kernels can be compiled without a GPU."""
    settings = HEADS["speculators-qwen3"]
    write_head(settings, tmp_path)
    config = ModelConfig.from_folder(target_folder)
    decoder = Decoder(config.with_head(read_eagle3(tmp_path, config)), TorchKernels(), ShapeAttention())
    head = build_head(decoder, Placement(META, TorchKernels(), ShapeAttention()), META)
    leave_empty(head.groups)
    kv = KVPool(decoder.config.kv_shape(16, torch.float32), 4, META)
    ids, states = torch.empty(5, dtype=torch.int64, device=META), torch.empty(5, 3 * 64, device=META)
    batch = AttentionBatch(
        slots=ids,
        page_table=torch.empty(5, 2, dtype=torch.int32, device=META),
        seq_lens=torch.empty(5, dtype=torch.int32, device=META),
        query_starts=torch.empty(6, dtype=torch.int32, device=META),
        num_decodes=5,
        query_lens=[1] * 5,
        context_lens=[1] * 5,
    )
    with torch.inference_mode():
        drafted = head.forward(ids, states, ids, batch, kv, ids[:2])
        assert head.logits(drafted.hidden).shape == (2, settings.draft_vocab)
        assert head.forward(ids, torch.empty(5, 64, device=META), ids, batch, kv, recycled=True).states.shape == (5, 64)
