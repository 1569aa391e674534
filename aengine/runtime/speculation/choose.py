"""Chooses the proposer of a runtime from the knobs and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.config import EngineConfig
from aengine.config.speculation import MAX_DRAFT_TOKENS, chosen_line, read_speculation
from aengine.errors import AengineError, ConfigError
from aengine.kernels.ngram.base import NgramKernels
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.drafting.dflash import DFlashHead
from aengine.model.drafting.dflash_config import read_dflash
from aengine.model.drafting.draft_config import read_draft_model
from aengine.model.drafting.eagle3 import Eagle3Head
from aengine.model.drafting.eagle3_config import read_eagle3
from aengine.model.loading.hub import resolve_model
from aengine.model.loading.load import open_checkpoint
from aengine.runtime.speculation.base import NO_PROPOSER, Proposer, ProposerChoice, ProposerParts, step_cost
from aengine.runtime.speculation.blocks import BlockProposer
from aengine.runtime.speculation.draft_model import DraftModelProposer
from aengine.runtime.speculation.heads import HeadProposer, ParallelProposer
from aengine.runtime.speculation.ngram import NgramProposer

log = logging.getLogger("aengine")

# Drafts of a row in a step, unless the knob `draft_tokens` says otherwise.
NGRAM_DRAFTS = 4
MTP_DRAFTS = 3
EAGLE3_DRAFTS = 4
PEAGLE_DRAFTS = 7
DRAFT_MODEL_DRAFTS = 4


def choose_proposer(
    config: EngineConfig, model: ModelConfig, device: torch.device, files: Path
) -> tuple[ModelConfig, ProposerChoice]:
    """Return the model with the draft head that it needs, and the proposer. Reads headers of weights.

    The knob `speculation` decides. By default a model drafts with its MTP layer, if it has one and the files of the
    model hold it as it must be. files: the folder of the model.

    Raises: ConfigError, CheckpointError.
    """
    wanted = read_speculation(config.speculation)
    kind = wanted.kind
    asked = "the knob speculation asks for it"
    if kind == "off" or (kind == "auto" and (model.mtp is None or device.type != "cpu")):
        on_gpu = "on a GPU, no model drafts unless the knob speculation asks for it"
        log.info(chosen_line("off", asked if kind == "off" else model.no_drafting or on_gpu))
        return model, NO_PROPOSER
    if model.recurrent and device.type != "cpu":
        log.warning(
            "speculation: for models with recurrent layers whole answers were not tested on a GPU; "
            "compare its tokens at temperature 0 with those of speculation off"
        )
    if kind == "ngram":
        drafts = config.draft_tokens or NGRAM_DRAFTS
        cost = step_cost("ngram", model, device)
        return model, ProposerChoice("ngram", asked, drafts, _maker("ngram", config, model, device), cost=cost)
    if kind == "eagle3" and wanted.path is not None:
        folder = resolve_model(wanted.path, knob="speculation")
        model = model.with_head(eagle := read_eagle3(folder, model))
        drafts = config.draft_tokens or (PEAGLE_DRAFTS if eagle.drafts_blocks else EAGLE3_DRAFTS)
        cost = step_cost("eagle3", model, device)
        return model, ProposerChoice("eagle3", asked, drafts, _make_head, cost=cost, head_folder=folder)
    if kind == "draft" and wanted.path is not None:
        folder = resolve_model(wanted.path, knob="speculation")
        model = model.with_head(read_draft_model(folder, model))
        drafts, cost = config.draft_tokens or DRAFT_MODEL_DRAFTS, step_cost("draft", model, device)
        return model, ProposerChoice("draft", asked, drafts, _make_head, cost=cost, head_folder=folder)
    if kind == "dflash" and wanted.path is not None:
        folder = resolve_model(wanted.path, knob="speculation")
        head = read_dflash(folder, model)
        model, most = model.with_head(head), head.block_size - 1
        if config.draft_tokens > most:
            raise ConfigError(f"draft_tokens: is {config.draft_tokens}, the head drafts at most {most}; lower it")
        drafts, cost = config.draft_tokens or min(most, MAX_DRAFT_TOKENS), step_cost("dflash", model, device)
        return model, ProposerChoice("dflash", asked, drafts, _make_head, cost=cost, head_folder=folder)
    if model.mtp is None:
        raise ConfigError(f"speculation: mtp cannot be used, because {model.no_drafting}; write ngram, auto or off")
    automatic = kind == "auto"
    if defect := _mtp_defect(config, model, files):
        if automatic:
            log.warning(chosen_line("off", f"the MTP layer cannot be used: {defect}"))
            return model, NO_PROPOSER
        raise ConfigError(f"speculation: mtp cannot be used: {defect}; write off, or ngram to draft without the layer")
    reason = "the checkpoint has an MTP layer" if automatic else asked
    drafts = config.draft_tokens or MTP_DRAFTS
    cost = step_cost("mtp", model, device)
    return model.with_drafting(), ProposerChoice("mtp", reason, drafts, _make_head, cost)


def _mtp_defect(config: EngineConfig, model: ModelConfig, files: Path) -> str:
    """Return why the model's MTP layer cannot be used. Empty if it can, or if the model cannot be used either."""
    plain = model.with_lora(None)  # adapters never change the layer
    ranks = 1 if config.tensor_parallel_size == "auto" else config.tensor_parallel_size

    def defect(one: ModelConfig) -> str:
        try:
            one.spread_over(ranks)
            if config.load_format == "auto":
                open_checkpoint(files, Decoder(one, TorchKernels(), TorchAttention()))
        except AengineError as error:
            return str(error)
        return ""

    found = defect(plain.with_drafting())
    return "" if found and defect(plain) else found


def rehearsed_proposer(
    name: str, most_drafts: int, config: EngineConfig, model: ModelConfig, device: torch.device
) -> ProposerChoice:
    """Return the proposer of this name for a start-up without weights.

    A draft head must be built before. The name and `most_drafts` are those of the choice that `choose_proposer` made.
    """
    if not most_drafts:
        return NO_PROPOSER
    return ProposerChoice(name, "for a rehearsal", most_drafts, _maker(name, config, model, device))


def _maker(
    name: str, config: EngineConfig, model: ModelConfig, device: torch.device
) -> Callable[[ProposerParts], Proposer]:
    if name != "ngram":
        return _make_head
    longest = config.max_model_len or model.max_position_embeddings
    return lambda parts: NgramProposer(_ngram_kernels(device), parts.rows, longest)


def _make_head(parts: ProposerParts) -> Proposer:
    """Return the proposer of a decoder's draft head."""
    head = parts.decoder.draft_head
    if head is None:
        raise RuntimeError("the model was loaded without its draft head")
    if isinstance(head, Decoder):
        return DraftModelProposer(head, parts.decoder, parts.kv, parts.sampler)
    if isinstance(head, DFlashHead):
        return BlockProposer(head, parts.kv, parts.sampler, parts.decoder.tables.length)
    if isinstance(head, Eagle3Head) and head.mask_id is not None:
        return ParallelProposer(head, head.mask_id, parts.kv, parts.sampler, parts.decoder.tables.length)
    return HeadProposer(head, parts.kv, parts.sampler, parts.decoder.tables.length)


def _ngram_kernels(device: torch.device) -> NgramKernels:
    if device.type == "cpu":
        from aengine.kernels.ngram import cpu_ngram

        return cpu_ngram
    from aengine.kernels.ngram import triton_ngram  # imports Triton, which a CPU does not need

    return triton_ngram
