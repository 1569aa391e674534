"""Compiles the kernels of a start-up in a process without a GPU. Its steps run on meta tensors and launch no kernel.

`main` reads a `Job` in JSON from standard input.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from aengine.attention.base import Attend, AttentionLayer, PrefillKernel
from aengine.attention.flash4 import HEADS, Flash4
from aengine.attention.flash4_offline import compile_flash4, launch_layers
from aengine.attention.flash_backend import HALVES, OnGathered, flash4_is_installed, flash4_runs_on
from aengine.attention.triton_backend import TritonAttention
from aengine.kernels.attention.heads import Scores
from aengine.kernels.collective.base import PendingSum
from aengine.kernels.collective.config import sum_pieces
from aengine.kernels.collective.threads import FinishedSum
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.small_linear import ROW_BORDERS
from aengine.kernels.offline import Share, compile_utilities, compiling
from aengine.kernels.triton_kernels import TritonKernels
from aengine.model.config import DraftModel
from aengine.model.decoder import Decoder
from aengine.model.groups import leave_empty
from aengine.model.loading.heads import build_head, build_model
from aengine.model.loading.load import Placement
from aengine.model.ranks.shard import Shard
from aengine.model.spec.attention import AttentionSpec
from aengine.runtime.cuda.capture import GraphSizes, make_executor, rehearse
from aengine.runtime.device import resolve_kv_dtype
from aengine.runtime.speculation.choose import rehearsed_proposer
from aengine.runtime.startup.compiling.job import Job
from aengine.runtime.startup.drafted_steps import drafted_steps, trial_steps
from aengine.runtime.startup.image_steps import image_steps
from aengine.runtime.startup.sizing.cuda_memory import trial_pool
from aengine.runtime.startup.sizing.pool import size_pool
from aengine.runtime.startup.sizing.states import states_of_rows
from aengine.runtime.startup.sizing.steps import StepSizes
from aengine.runtime.startup.sizing.windows import trial_windows
from aengine.runtime.startup.warm_up import (
    greediest_steps,
    uncaptured_steps,
    widest_step,
    with_adapters,
)

META = torch.device("meta")


def rehearse_triton(job: Job) -> None:
    """Compile this process's share of the Triton kernels that `start_cuda` launches."""
    with compiling(job.capability, job.launch, Share(job.index, job.count), job.threads):
        run_through(job)
        if job.index == 0:
            compile_utilities()


@torch.inference_mode()
def run_through(job: Job) -> None:
    """Run the steps of a start-up in its order on the meta device."""
    config, dtype = job.config, getattr(torch, job.dtype)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    attention = TritonAttention(lambda: absent_prefill(job.capability, dtype), job.most_drafts > 0)
    ranks = _AbsentRanks(job.model.ranks) if job.model.ranks > 1 else None
    kernels = TritonKernels(job.model.unpacked_copies)
    decoder = Decoder(job.model, kernels, attention, dtype, META, config.max_model_len, kv_dtype, ranks)
    leave_empty(decoder.groups)
    placement = Placement(META, kernels, attention, ranks)
    if isinstance(job.model.added_head, DraftModel):
        decoder.draft_head = drafting = build_model(decoder, placement, job.model.added_head, META)
        leave_empty(drafting.groups)
        drafting.keep_rehearsed_layers()
    elif job.model.added_head is not None:
        decoder.draft_head = head = build_head(decoder, placement, META)
        leave_empty(head.groups)
    drafts = job.most_drafts
    speculation = rehearsed_proposer(job.proposer, drafts, config, job.model, META)
    decoder.keep_rehearsed_layers()
    steps = StepSizes.from_config(config, job.model, job.capability, job.launch.processors)
    lora = job.model.lora is not None
    sizes = GraphSizes.from_config(
        config, attention.capturable, steps.mixed.tokens, steps.most, job.model.ranks, lora, drafts
    )
    rows_alone = states_of_rows(config, job.model, dtype, drafts)
    if config.kv_cache_gib is None:
        num_pages, length = trial_pool(config, decoder, steps.most, drafts)
        windows = trial_windows(config, job.model, kv_dtype)
        trial = make_executor(
            config, decoder, num_pages, length, sizes.largest, attention.fits, rows_alone, windows, speculation
        )
        for plan in with_adapters(trial_steps(config, steps.most, length, drafts), lora):
            trial.execute(plan)
        rehearse(trial)
    pool = size_pool(config, job.model, kv_dtype, job.kv_bytes, dtype=dtype, most_drafts=drafts)
    executor = make_executor(
        config, decoder, pool.num_pages, pool.max_model_len, sizes, attention.fits, pool.states, pool.windows,
        speculation,
    )  # fmt: skip
    longest = pool.max_model_len
    uncaptured = uncaptured_steps(config, job.model, dtype, job.launch, steps.most, longest, sizes, drafts)
    if config.kv_cache_gib is None:  # the next start-up knows its memory and runs this step instead of a trial
        uncaptured.append(widest_step(config, steps.most, longest))
    uncaptured += image_steps(config, job.model, steps.most, longest)
    executor.rehearse_images(True)
    for plan in with_adapters(uncaptured, lora):
        executor.execute(plan)
    executor.rehearse_images(False)
    rehearse(executor)
    drafted = drafted_steps(config, job.model, dtype, job.launch, steps.most, longest, drafts)
    for plan in with_adapters([*greediest_steps(), *drafted], lora):
        executor.execute(plan)


class _AbsentRanks:
    """Collective operations of the first of several ranks, if the other ranks do not exist."""

    index = 0

    def __init__(self, count: int) -> None:
        self.count = count
        self.pending: deque[PendingSum] = deque()

    def begin_step(self, rehearsal: bool, halves: bool) -> None:
        self.pending.clear()

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        return part

    def pieces(self, tokens: int) -> Sequence[slice]:
        return sum_pieces(tokens)

    def begin_sum(self, part: Tensor, residual: Tensor) -> PendingSum:
        return FinishedSum(residual, self.pending)

    def sum_and_norm(self, part: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        return part, part

    def gather(self, part: Tensor, width: int) -> Tensor:
        return part.new_empty(len(part), width)


class _Reference(OnGathered):
    """Supports heads of all widths, like torch's own attention."""

    def bind(self, layer: AttentionLayer) -> Attend | None:
        return self.attend_for(layer) if layer.scores.plain else None


def absent_prefill(capability: tuple[int, int], dtype: torch.dtype) -> PrefillKernel:
    """Return the prefill kernel that `choose_prefill` would return, without the launches of other packages' kernels."""
    if dtype in HALVES and flash4_runs_on(capability) and flash4_is_installed():
        return Flash4("absent", lambda q, *_, **__: torch.empty_like(q))
    absent = OnGathered if dtype in HALVES else _Reference
    return absent("absent", "", lambda q, *_: torch.empty_like(q))


def compile_flash(job: Job) -> None:
    """Compile this process's share of the kernels of flash-attn-4."""

    def launch(attention: Flash4) -> None:
        launch_flash(job, attention, torch.device("cuda"))

    compile_flash4(launch, job.capability, job.launch.processors, job.index, job.count)


def launch_flash(job: Job, attention: Flash4, device: torch.device) -> None:
    """Launch prefill attention for all numbers of tokens that a start-up runs."""
    config, model, dtype = job.config, job.model, getattr(torch, job.dtype)
    steps = StepSizes.from_config(config, model, job.capability, job.launch.processors)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    sizes = GraphSizes.from_config(config, True, steps.mixed.tokens, steps.most, model.ranks)
    kinds: dict[tuple[int, int, int], list[AttentionSpec]] = {}
    for one, ranks in job.attending:
        if isinstance(one, AttentionSpec) and one.head_dim in HEADS:
            units = Shard(count=ranks).units
            kinds.setdefault((units(one.heads), units(one.kv_heads), one.head_dim), []).append(one)
    for (heads, kv_heads, dim), layers in kinds.items():
        sinks = torch.empty(heads, device=device)
        different = dict.fromkeys((one.masked_window, one.softcap, one.sinks) for one in layers)
        launch_layers(
            attention,
            device,
            tokens=sorted({1, *ROW_BORDERS, *sizes.prefill, steps.most}),
            layers=[
                AttentionLayer(dim, dim**-0.5, window, Scores(softcap, sinks if has_sinks else None))
                for window, softcap, has_sinks in different
            ],
            heads=heads,
            kv_heads=kv_heads,
            page_size=config.page_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    if job.package == "triton":
        rehearse_triton(job)
    else:
        compile_flash(job)
