"""Loads draft heads from folders of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from aengine.errors import WeightsError
from aengine.model.blocks.build import BuildContext
from aengine.model.checkpoint.foreign import refuse_layout
from aengine.model.checkpoint.staging import WeightsDigest
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import DraftModel
from aengine.model.decoder import Decoder
from aengine.model.drafting.dflash import DFlashHead
from aengine.model.drafting.eagle3 import Eagle3Head
from aengine.model.drafting.ends import UNUSED, TargetEnds
from aengine.model.families.heads import Eagle3Spec
from aengine.model.loading.load import Placement, fill_random, load_shards
from aengine.model.parameters import Parameters
from aengine.model.rope import PositionTables


def load_heads(
    folder: Path,
    targets: Sequence[Decoder],
    placements: Sequence[Placement],
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    progress: bool = False,
    digest: WeightsDigest | None = None,
) -> None:
    """Build the draft head of each decoder, or a rank's part of it, and fill it. Does blocking I/O.

    The decoders' configuration has the head: `config.with_head(read_eagle3(folder, config))`, or `read_dflash`, or
    `read_draft_model` for a draft model. The head has the decoder's dtype, KV dtype and device. If its layers cannot be
    divided evenly among the ranks, each rank has all.

    Args:
        folder: The head's, not the target's.
        targets, placements: The decoders of all ranks, and the placements that `load_shards` loaded them to.
        load_format, seed, progress, digest: As in `load_shards`.

    Raises: WeightsError
    """
    if isinstance(spec := targets[0].config.added_head, DraftModel):
        drafting = _load_models(folder, spec, targets, placements, load_format, seed, progress, digest)
        for target, decoder in zip(targets, drafting):
            target.draft_head = decoder
        return
    if load_format == "auto":  # files that do not fit are refused before memory is allocated
        checkpoint = _open(folder, build_head(targets[0], placements[0], torch.device("meta")))
    heads = [build_head(target, one, target.device) for target, one in zip(targets, placements, strict=True)]
    if load_format == "auto":
        checkpoint.copy_into([head.groups for head in heads], progress, digest)
    for target, head in zip(targets, heads):
        if load_format == "dummy":
            fill_random(head.groups, target.device, seed)
        target.draft_head = head


def _load_models(
    folder: Path,
    spec: DraftModel,
    targets: Sequence[Decoder],
    placements: Sequence[Placement],
    load_format: Literal["auto", "dummy"],
    seed: int,
    progress: bool,
    digest: WeightsDigest | None,
) -> list[Decoder]:
    """Return the draft model of each decoder, or a rank's part of it."""
    first = targets[0]
    ranks = spec.spread_over(first.config.ranks)
    return load_shards(
        folder,
        spec.model.spread_over(ranks),
        placements if ranks > 1 else [replace(one, ranks=None) for one in placements],
        dtype=first.dtype,
        load_format=load_format,
        seed=seed,
        progress=progress,
        max_positions=first.tables.max_positions,
        kv_dtype=first.kv_dtype,
        digest=digest,
        first_kv_layer=len(first.config.paging),
    )


def build_model(target: Decoder, placement: Placement, spec: DraftModel, device: torch.device) -> Decoder:
    """Return the draft model of a decoder without its weights. device: the decoder's, or "meta"."""
    ranks = spec.spread_over(target.config.ranks)
    return Decoder(
        spec.model.spread_over(ranks),
        placement.kernels,
        placement.attention,
        target.dtype,
        device,
        target.tables.max_positions,
        target.kv_dtype,
        placement.ranks if ranks > 1 else None,
        len(target.config.paging),
    )


def build_head(target: Decoder, placement: Placement, device: torch.device) -> Eagle3Head | DFlashHead:
    """Return the draft head of a decoder without its weights. device: the decoder's, or "meta"."""
    config, spec = target.config, target.config.added_head
    if spec is None or isinstance(spec, DraftModel):
        raise ValueError("the decoder's configuration has no draft head; build the decoder with config.with_head()")
    ranks = placement.ranks if spec.spread_over(config.ranks) > 1 else None
    make = Parameters(placement.kernels, target.dtype, device, None, target.kv_dtype, target.rounds_drafts, ranks)
    tables = target.tables if device == target.device else PositionTables(1, device)
    build = BuildContext(make, spec.hidden_size, spec.rms_norm_eps, tables, placement.attention)
    ends = TargetEnds(target.embed, target.rounded_output, len(config.paging), target.near_shift)
    return Eagle3Head(build, spec, ends) if isinstance(spec, Eagle3Spec) else DFlashHead(build, spec, ends)


def _open(folder: Path, head: Eagle3Head | DFlashHead) -> Checkpoint:
    """Return the weights in `folder`, matched to a head. Reads headers only."""
    try:
        return Checkpoint(folder, head.groups, tied=False, ignored_prefixes=UNUSED)
    except WeightsError:
        refuse_layout(folder, "speculation")
        raise
