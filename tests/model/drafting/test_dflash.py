"""A DFlash head drafts what its description says, computed in float64 without pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.model.decoder import Decoder
from aengine.model.drafting.dflash import DFlashHead
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.dflash_reference import DFlashReference, DFlashSettings
from tests.model.drafting.head_reference import make_tensors, write_head
from tests.model.drafting.steps import Sequences
from tests.model.ranks import Counted, InPieces, Ranks

DRAFTS = 5
LENGTHS = (1, 5, 11)
LAST_IDS = (7, 40, 3)
_SPECULATORS = DFlashSettings(speculators=True, draft_vocab=40, own_head=True)
HEADS = {
    "plain": DFlashSettings(),
    "plain-named-as-in-a-model": DFlashSettings(prefix="model.", own_embedding=True, own_head=True),
    "plain-causal": DFlashSettings(causal=True, layers=1),
    "plain-narrower-than-the-target": DFlashSettings(hidden=48, own_embedding=True, own_head=True),
    "speculators": _SPECULATORS,
    "speculators-llama-with-biases": replace(_SPECULATORS, qk_norm=False, bias=True, layers=3),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers that does not share its embedding with its output matrix."""
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint("llama2", folder, num_hidden_layers=4, vocab_size=96, tie_word_embeddings=False)
    return folder


def random_states(settings: DFlashSettings) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    width = len(settings.taps) * settings.target_hidden
    return [3 * torch.randn(tokens, width, generator=generator) for tokens in LENGTHS]


def head_of(decoder: Decoder) -> DFlashHead:
    assert isinstance(decoder.draft_head, DFlashHead)
    return decoder.draft_head


def block_batch(sequences: Sequences, starts: Sequence[int], causal: bool) -> tuple[Tensor, AttentionBatch]:
    """Return positions and batch of one block of each sequence, each token a decode."""
    count = 1 + DRAFTS
    positions, batch = sequences.batch([range(start, start + count) for start in starts], True)
    ends = positions + 1 if causal else torch.tensor(starts).repeat_interleave(count) + count
    return positions, AttentionBatch(
        slots=batch.slots,
        page_table=batch.page_table.repeat_interleave(count, dim=0),
        seq_lens=ends.to(torch.int32),
        query_starts=torch.arange(len(positions) + 1, dtype=torch.int32),
        num_decodes=len(positions),
        query_lens=[1] * len(positions),
        context_lens=ends.tolist(),
    )


def draft(decoder: Decoder, settings: DFlashSettings, states: list[Tensor], chunk: int = 100) -> list[Tensor]:
    """Show the head all states in chunks of at most this many tokens, and return the logits of each block."""
    head, sequences = head_of(decoder), Sequences(decoder, len(states))
    with torch.inference_mode():
        for start in range(0, max(map(len, states)), chunk):
            spans = [range(min(start, len(one)), min(start + chunk, len(one))) for one in states]
            positions, batch = sequences.batch(spans)
            shown = torch.cat([one[span.start : span.stop] for one, span in zip(states, spans)])
            head.observe(shown.to(decoder.dtype), positions, batch.slots, sequences.kv)
        positions, batch = block_batch(sequences, [len(one) for one in states], head.is_causal)
        ids = torch.full((len(states), 1 + DRAFTS), head.mask_id)
        ids[:, 0] = torch.tensor(LAST_IDS)
        wanted = torch.arange(ids.numel()).view(ids.shape)[:, 1:].flatten()
        hidden = head.draft(ids.flatten(), positions, batch, sequences.kv, wanted)
        return list(head.logits(hidden).view(len(states), DRAFTS, -1))


def check(settings: DFlashSettings, tensors: dict[str, Tensor], decoder: Decoder, chunk: int = 100) -> None:
    """Compare the logits of all drafts with the reference."""
    embedding = decoder.embed(torch.arange(settings.target_vocab))
    output = decoder.logits(torch.eye(settings.target_hidden, dtype=decoder.dtype)).T
    reference, states = DFlashReference(settings, tensors, embedding, output), random_states(settings)
    for one, last_id, logits in zip(states, LAST_IDS, draft(decoder, settings, states, chunk), strict=True):
        expected = reference.draft(one, last_id, DRAFTS)
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [100, 3])
@pytest.mark.parametrize("case", HEADS)
def test_blocks_after_prompts(case: str, chunk: int, target_folder: Path, tmp_path: Path) -> None:
    """chunk: prompts are shown in one step, or in steps of three tokens."""
    settings, tensors = HEADS[case], make_tensors(HEADS[case])
    decoder = Ranks(target_folder, 1, dflash=write_head(settings, tmp_path, tensors)).decoders[0]
    check(settings, tensors, decoder, chunk)
    ids = head_of(decoder).token_ids
    assert (ids is None) == ("d2t" not in tensors)
    if ids is not None:
        assert ids.tolist() == (tensors["d2t"] + torch.arange(settings.draft_vocab)).tolist()


@pytest.mark.parametrize("collective", [Counted, InPieces])
@pytest.mark.parametrize("case", ["plain", "speculators", "plain-named-as-in-a-model", "whole"])
def test_ranks_draft_the_same(case: str, collective: type[Counted], target_folder: Path, tmp_path: Path) -> None:
    """whole: three heads cannot be divided between two ranks, so each rank has the whole head."""
    settings = (HEADS | {"whole": DFlashSettings(heads=3, kv_heads=3)})[case]
    tensors = make_tensors(settings)
    ranks = Ranks(target_folder, 2, collective=collective, dflash=write_head(settings, tmp_path, tensors))
    ranks.each(lambda decoder: check(settings, tensors, decoder))
    kept = [[layer.heads for layer in head_of(decoder).kv_layers] for decoder in ranks.decoders]
    assert kept == [[3 if case == "whole" else 1] * settings.layers] * 2


def test_it_has_the_dtype_of_the_target_and_keys_may_be_fp8(target_folder: Path, tmp_path: Path) -> None:
    settings = HEADS["speculators"]
    write_head(settings, tmp_path)
    states = random_states(settings)
    exact = torch.cat(draft(Ranks(target_folder, 1, dflash=tmp_path).decoders[0], settings, states))
    for dtype, kv_dtype in ((torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)):
        decoder = Ranks(target_folder, 1, dtype, dflash=tmp_path, kv_dtype=kv_dtype).decoders[0]
        found = torch.cat(draft(decoder, settings, states))
        assert found.dtype == dtype
        assert not torch.equal(found.float(), exact)
        torch.testing.assert_close(found.float(), exact, atol=0.3, rtol=0)


def test_shifted_positions_are_shifted_back(tmp_path: Path) -> None:
    """Sequences within longrope's trained context have shifted positions. Layers of a head rotate by the plain ones."""
    write_checkpoint("phi3-beyond-the-trained-context", tmp_path / "target", vocab_size=96, num_hidden_layers=4)
    settings = HEADS["plain"]
    tensors = make_tensors(settings)
    decoder = Ranks(tmp_path / "target", 1, dflash=write_head(settings, tmp_path / "head", tensors)).decoders[0]
    head, shift = head_of(decoder), decoder.near_shift
    assert shift > 0
    states, found = random_states(settings)[1], []
    for add in (0, shift):
        sequences = Sequences(decoder, 1)
        positions, batch = sequences.batch([range(5)])
        with torch.inference_mode():
            head.observe(states, positions + add, batch.slots, sequences.kv)
            positions, batch = block_batch(sequences, [5], causal=False)
            ids = torch.full_like(positions, head.mask_id)
            found.append(head.draft(ids, positions + add, batch, sequences.kv, torch.arange(1, 1 + DRAFTS)))
    torch.testing.assert_close(found[1], found[0])
