"""The interface of proposers, the tokens from which they start, and the cost of their steps before any is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.config.speculation import chosen_line
from aengine.model.config import DraftModel, ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.drafting.base import DraftHead, Taps, TapStates
from aengine.model.drafting.dflash import DFlashHead
from aengine.model.families.heads import DFlashSpec
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.verdict import DraftedRows
from aengine.sampling.sampler import Draws, Sampler
from aengine.step_cost import FREE, StepCost
from aengine.step_plan import NewRow, StepPlan

# For `step_cost`. Free tokens: so many tokens take as long to compute as the weights take to read.
_GPU_FREE_TOKENS = 150.0  # floats on an H200: 700 TFLOP/s of matrix products, 4.1 TB/s of reading
_CPU_FREE_TOKENS = 8.0
_NGRAM_DRAFT = 0.001


def tap_states(taps: Taps | None, tokens: int, decoder: Decoder) -> TapStates | None:
    """Return memory for the hidden states that a draft head reads of a step.

    None if there is no head, or if it reads the decoder's output.
    """
    if taps is None or not taps.layers:
        return None
    shape = (tokens, len(taps.layers) * decoder.config.hidden_size)
    return TapStates(taps.layers, torch.empty(shape, dtype=decoder.dtype, device=decoder.device))


@dataclass(slots=True)
class Kept:
    """The tokens that each drawing row of a step keeps, on the device, in the order of the results."""

    rows: Tensor  # [n] int64
    tokens: Tensor  # [n, width] int64; row i keeps the first counts[i], the others are arbitrary
    counts: Tensor  # [n] int64, at least 1; 0 for the padding row, which only captured steps contain
    places: Tensor  # [n] int64: the place of the last kept token among the step's draws
    drawn: Tensor  # [draws] int64: all drawn tokens, kept or not

    @classmethod
    def of_step(cls, draw_rows: Tensor, draws: Draws, drafted: DraftedRows | None) -> Kept:
        """Return the kept tokens of a step after its verification. draw_rows: [draws] int64."""
        token_ids = draws.token_ids
        if drafted is None or draws.counts is None:
            ones, places = torch.ones_like(token_ids), torch.arange(len(token_ids), device=token_ids.device)
            return cls(draw_rows, token_ids[:, None], ones, places, token_ids)
        start, end = drafted.places.start, drafted.places.stop
        width = drafted.most + 1
        rows = torch.cat((draw_rows[:start], drafted.rows, draw_rows[end:]))
        others = [token_ids[part, None].expand(-1, width) for part in (slice(start), slice(end, None))]
        ones = torch.ones_like(token_ids)
        counts = torch.cat((ones[:start], draws.counts, ones[end:]))
        all_places = torch.arange(len(token_ids), device=token_ids.device)
        places = torch.cat((all_places[:start], drafted.first + draws.counts - 1, all_places[end:]))
        tokens = torch.cat((others[0], drafted.gather(token_ids), others[1]))
        return cls(rows, tokens, counts, places, token_ids)


class Proposer(Protocol):
    """Drafts tokens for rows. Calls are in the order of the steps, and only enqueue work on a device.

    A CUDA graph captures `propose` for plans without prompts. Then every row has the same number of drafts, all tensors
    have fixed shapes, rows may be padding, and the plan has only upper bounds.
    """

    name: str  # for statistics
    taps: Taps | None  # the hidden states that it reads of every step. None: it reads none.

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Note the tokens of rows that get a new sequence. Called before the step's forward pass."""
        ...

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        """Write up to `plan.proposals` drafts of each drawing row into `Rows.next_tokens`. Called after the verdict.

        A step with `is_read` False may leave out this call. Later drafts of its rows may be worse, but not an error.

        The drafts follow the row's last token. With 0 proposals, only note the step's tokens.

        Args:
            kept: None if no row draws.
            inputs: None if `taps` is None.
        """
        ...


class PagedProposer:
    """A `Proposer` that runs a head or a model over every step. The pages hold all that it knows of a row."""

    def __init__(self, name: str, taps: Taps) -> None:
        self.name = name
        self.taps: Taps | None = taps

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Do nothing."""

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        """See `Proposer.propose`."""
        if inputs is None:
            raise RuntimeError(f"{self.name} needs the tokens and the hidden states of the step")
        drafts = self._draft(plan, kept, rows, inputs)
        if drafts is not None and kept is not None:
            rows.next_tokens[1 : len(drafts) + 1].index_copy_(1, kept.rows, drafts)

    def _draft(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs) -> Tensor | None:
        """Read the step, and return the drafts of its drawing rows, [proposals, n] int64. None: there are none."""
        raise NotImplementedError


def choose(head: DraftHead | DFlashHead, hidden: Tensor, rows: Tensor, positions: Tensor, sampler: Sampler) -> Tensor:
    """Return drafts, [n] int64.

    hidden: [n, width], of a head's run. rows, positions: [n] int64, of the drafts. sampler: the target's. A draft has
    the noise that the target will have at its position, so that a row with a temperature accepts more drafts.
    """
    logits, token_ids = head.logits(hidden), head.token_ids
    if token_ids is None:
        return sampler.draw_simple(logits, rows, positions).token_ids
    return token_ids.index_select(0, logits.argmax(dim=-1))


@dataclass(frozen=True, slots=True)
class ProposerParts:
    """The parts of a rank's runtime from which a proposer is made."""

    decoder: Decoder
    kv: KVPool
    sampler: Sampler
    rows: Rows


@dataclass(frozen=True, slots=True)
class ProposerChoice:
    """The proposer of a runtime, before its rows exist."""

    name: str  # `Proposer.name`
    reason: str  # why it was chosen, for the start-up log
    most_drafts: int  # the most drafts of a row in a step; 0: there is no speculation
    make: Callable[[ProposerParts], Proposer | None]
    cost: StepCost = FREE  # from which the number of drafts is chosen
    head_folder: Path | None = None  # the files of a draft head that are not the model's own

    @property
    def line(self) -> str:
        """The line about the proposer in the start-up log."""
        return chosen_line(self.name, self.reason, self.most_drafts)


NO_PROPOSER = ProposerChoice("off", "", 0, lambda parts: None)


def step_cost(proposer: str, model: ModelConfig, device: torch.device) -> StepCost:
    """Return the cost of steps of a model that drafts with this proposer: ngram, draft, or the name of a draft head."""
    parameters = model.active_parameters
    numbers = model.kv_shape(1, torch.bfloat16).page_bytes * model.ranks / 2  # keys and values of a token
    on_gpu = device.type != "cpu"
    make = partial(StepCost, _GPU_FREE_TOKENS if on_gpu else _CPU_FREE_TOKENS, padded=on_gpu)
    context = numbers / parameters
    if proposer == "ngram":  # it must read every step; this takes next to no time
        return make(draft=_NGRAM_DRAFT, reading=0.0, context=context)
    if isinstance(model.added_head, DraftModel):
        share = model.added_head.model.active_parameters / parameters
        return make(draft=share, reading=share, context=context)
    if (added := model.added_head) is not None and added.drafts_blocks:
        join, *of_layers = (n * k / parameters for n, k in added.linears(1))
        reading = layers = sum(of_layers)
        if isinstance(added, DFlashSpec):  # it reads states only for their keys and values
            reading = sum(2 * one.kv_heads * one.head_dim * added.hidden_size for one in added.attention) / parameters
        block = layers + added.draft_vocab_size * added.hidden_size / parameters
        return make(draft=0.0, reading=join + reading, block=block, context=context)
    head = (parameters - model.end_parameters) / len(model.layers)  # a draft head is about one layer
    output = model.vocab_size * model.hidden_size
    return make(draft=(head + output) / parameters, reading=head / parameters, context=context)
