"""Proposers that make several drafts in one run draft what their heads predict after each row's last token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.model.decoder import Decoder
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.speculation.base import Kept, ProposerParts
from aengine.runtime.speculation.choose import _make_head
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.step_plan import NewRow, PrefillChunk, StepPlan
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.dflash_reference import DFlashReference, DFlashSettings
from tests.model.drafting.eagle3_reference import HeadSettings, Reference
from tests.model.drafting.head_reference import make_tensors, write_head
from tests.model.ranks import Ranks

PAGE = 4
DRAFTS = 5
LENGTHS = (3, 7, 8)
LAST_IDS = (7, 40, 3)
CPU = torch.device("cpu")
HEADS = {
    "all tokens": DFlashSettings(),
    "causal": DFlashSettings(causal=True),
    "mapped tokens": DFlashSettings(speculators=True, draft_vocab=40, own_head=True),
}
PARALLEL_HEADS = {
    "plain": HeadSettings(mask=95, bias=True, norm_before_fc=True),
    "speculators": HeadSettings(mask=3, speculators=True, layers=3, norm_output=True, fc_norm=True, draft_vocab=96),
    "own embedding": HeadSettings(mask=0, speculators=True, norm_before_residual=True, own_embedding=True),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint("llama2", folder, num_hidden_layers=4, vocab_size=96, tie_word_embeddings=False)
    return folder


@dataclass
class Rig:
    """Rows whose prompts were computed, and their proposer."""

    decoder: Decoder
    states: list[Tensor]

    def propose(self, pages: int, chosen: tuple[int, ...] = (0, 1, 2)) -> list[list[int]]:
        """Return the drafts of rows after their prompts, of which row i has states[i]. pages: of each row."""
        kv = KVPool(self.decoder.config.kv_shape(PAGE, torch.float32), 40, CPU)
        kv.data.fill_(float("nan"))  # contents of former owners must not matter
        rows, sampler = Rows(4, 8, CPU, most_drafts=DRAFTS), Sampler(5, 96, CPU)
        new = [
            NewRow(
                row=i, params=SamplingParams(temperature=0.0), seed=i, stop_ids=(), prompt_len=LENGTHS[i],
                tokens=[1] * LENGTHS[i], length=LENGTHS[i], pages=[1 + 8 * i + page for page in range(pages)][::-1],
            )
            for i in chosen
        ]  # fmt: skip
        rows.admit(new)
        sampler.set_rows(new)
        index = torch.tensor(chosen)
        rows.last_token[index] = last = torch.tensor([LAST_IDS[i] for i in chosen])
        token_rows = torch.cat([torch.full((LENGTHS[i],), i) for i in chosen])
        positions = torch.cat([torch.arange(LENGTHS[i]) for i in chosen])
        ends = torch.tensor([LENGTHS[i] for i in chosen]).cumsum(0)
        batch = AttentionBatch(
            slots=rows.slots(token_rows, positions, PAGE),
            page_table=rows.page_table[index],
            seq_lens=rows.length[index].to(torch.int32),
            query_starts=torch.cat((torch.zeros(1), ends)).to(torch.int32),
            num_decodes=0,
            query_lens=[LENGTHS[i] for i in chosen],
            context_lens=[LENGTHS[i] for i in chosen],
        )
        states = torch.cat([self.states[i] for i in chosen])
        plan = StepPlan(
            step=0, new_rows=new, new_pages=[], decode=[], page_copies=[], proposals=DRAFTS,
            prefill=[PrefillChunk(i, 0, [1] * LENGTHS[i], samples=True) for i in chosen],
        )  # fmt: skip
        kept = Kept(index, last[:, None], torch.ones_like(last), torch.arange(len(last)), last)
        proposer = _make_head(ProposerParts(self.decoder, kv, sampler, rows))
        with torch.inference_mode():
            proposer.propose(plan, kept, rows, HeadInputs(token_rows, ends - 1, positions, batch, states))
        return [list(one) for one in rows.drafts(index, DRAFTS).tolist()]


def make_rig(target_folder: Path, head_folder: Path, settings: DFlashSettings | HeadSettings) -> Rig:
    kind = "dflash" if isinstance(settings, DFlashSettings) else "eagle3"
    decoder = Ranks(target_folder, 1, **{kind: write_head(settings, head_folder)}).decoders[0]
    generator = torch.Generator().manual_seed(7)
    width = len(settings.taps) * settings.target_hidden
    return Rig(decoder, [3 * torch.randn(tokens, width, generator=generator) for tokens in LENGTHS])


@pytest.mark.parametrize("case", HEADS)
def test_greedy_rows_get_the_most_likely_tokens(case: str, target_folder: Path, tmp_path: Path) -> None:
    settings = HEADS[case]
    rig, tensors = make_rig(target_folder, tmp_path, settings), make_tensors(settings)
    embedding = rig.decoder.embed(torch.arange(96))
    reference = DFlashReference(settings, tensors, embedding, rig.decoder.logits(torch.eye(64)).T)
    ids = torch.arange(settings.draft_vocab) + tensors.get("d2t", torch.tensor(0))
    expected = [
        ids[reference.draft(states, last, DRAFTS).argmax(-1)].tolist() for states, last in zip(rig.states, LAST_IDS)
    ]
    assert rig.propose(pages=4) == expected


@pytest.mark.parametrize("case", PARALLEL_HEADS)
def test_masks_after_the_first_draft(case: str, target_folder: Path, tmp_path: Path) -> None:
    """The tokens of a prompt are all the number of its row."""
    settings = PARALLEL_HEADS[case]
    rig, tensors = make_rig(target_folder, tmp_path, settings), make_tensors(settings)
    ids = torch.arange(settings.draft_vocab) + tensors.get("d2t", torch.tensor(0))
    expected = []
    for row, (states, last) in enumerate(zip(rig.states, LAST_IDS)):
        output = rig.decoder.logits(torch.eye(64)).T
        sequence = Reference(settings, tensors, rig.decoder.embed(torch.arange(96)), output)
        for next_id, state in zip([row] * (len(states) - 1) + [last], states, strict=True):
            logits, _ = sequence.step(next_id, state, recycled=False)
        every = [logits, *(sequence.mask() for _ in range(DRAFTS - 1))]
        expected.append([int(ids[one.argmax()]) for one in every])
    assert rig.propose(pages=4) == expected


def test_rows_without_pages_for_their_blocks_draft_as_they_do_alone(target_folder: Path, tmp_path: Path) -> None:
    """The prompts fill two pages or less, and a block reaches into the third and the fourth."""
    rig = make_rig(target_folder, tmp_path, HEADS["all tokens"])
    together = rig.propose(pages=2)
    assert together == [rig.propose(2, (i,))[0] for i in range(3)]
    assert together != rig.propose(pages=4)  # they see less of their block
