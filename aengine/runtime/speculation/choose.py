"""Chooses the proposer of a runtime from the knobs and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from aengine.config import EngineConfig
from aengine.config.speculation import MAX_DRAFT_TOKENS, chosen_line, read_speculation
from aengine.errors import ConfigError
from aengine.kernels.ngram.base import NgramKernels
from aengine.model.config import DraftModel, ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.drafting.dflash import DFlashHead
from aengine.model.drafting.dflash_config import read_dflash
from aengine.model.drafting.draft_config import read_draft_model
from aengine.model.drafting.eagle3 import Eagle3Head
from aengine.model.drafting.eagle3_config import read_eagle3
from aengine.model.families.heads import DFlashSpec, Eagle3Spec
from aengine.model.loading.hub import resolve_model
from aengine.runtime.speculation.base import NO_PROPOSER, Proposer, ProposerChoice, ProposerParts, step_cost
from aengine.runtime.speculation.blocks import BlockProposer
from aengine.runtime.speculation.draft_model import DraftModelProposer
from aengine.runtime.speculation.heads import HeadProposer, ParallelProposer
from aengine.runtime.speculation.ngram import NgramProposer
from aengine.runtime.weights import find_defect

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

    The knob `speculation` decides. By default no model drafts on a GPU. On a CPU, a model drafts with its MTP layer if
    it has one, and if the files of the model have its weights in the right shapes. files: the folder of the model.

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
        drafts, make = config.draft_tokens or NGRAM_DRAFTS, _maker("ngram", config, model, device)
        return model, ProposerChoice("ngram", asked, drafts, make, step_cost("ngram", model, device))
    if wanted.path is not None:
        folder = resolve_model(wanted.path, knob="speculation")
        head, default = _read_head(kind, folder, model)
        if isinstance(head, DFlashSpec) and config.draft_tokens > (most := head.block_size - 1):
            raise ConfigError(f"draft_tokens: is {config.draft_tokens}, the head drafts at most {most}; lower it")
        model, drafts = model.with_head(head), config.draft_tokens or default
        return model, ProposerChoice(kind, asked, drafts, _make_head, step_cost(kind, model, device), folder)
    if model.mtp is None:
        raise ConfigError(f"speculation: mtp cannot be used, because {model.no_drafting}; write ngram, auto or off")
    automatic = kind == "auto"
    plain = model.with_lora(None)  # adapters never change the layer
    if defect := find_defect(config, files, plain.with_drafting(), plain):
        if automatic:
            log.warning(chosen_line("off", f"the MTP layer cannot be used: {defect}"))
            return model, NO_PROPOSER
        raise ConfigError(f"speculation: mtp cannot be used: {defect}; write off, or ngram to draft without the layer")
    reason = "the checkpoint has an MTP layer" if automatic else asked
    choice = ProposerChoice(
        "mtp", reason, config.draft_tokens or MTP_DRAFTS, _make_head, step_cost("mtp", model, device)
    )
    return model.with_drafting(), choice


def _read_head(kind: str, folder: Path, model: ModelConfig) -> tuple[Eagle3Spec | DFlashSpec | DraftModel, int]:
    """Return the head or the draft model in a folder, and how many drafts it makes by default."""
    if kind == "draft":
        return read_draft_model(folder, model), DRAFT_MODEL_DRAFTS
    if kind == "eagle3":
        eagle = read_eagle3(folder, model)
        return eagle, PEAGLE_DRAFTS if eagle.drafts_blocks else EAGLE3_DRAFTS
    dflash = read_dflash(folder, model)
    return dflash, min(dflash.block_size - 1, MAX_DRAFT_TOKENS)


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
