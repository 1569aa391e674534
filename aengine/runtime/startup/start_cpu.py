"""Starts a runtime on the CPU, which computes in one worker thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.cache.kv import KVPool
from aengine.cache.states import StatePool
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import Placement
from aengine.runtime.adapters import HostFiller
from aengine.runtime.device import forward_threads, host_memory, resolve_dtype, resolve_kv_dtype
from aengine.runtime.page_copies import HostCopier, RankedCopies
from aengine.runtime.ranks import RankedExecutor, ThreadedRanks
from aengine.runtime.runner import CpuRunner, StepExecutor
from aengine.runtime.sleep import HostSleep
from aengine.runtime.speculation.base import ProposerChoice, ProposerParts
from aengine.runtime.speculation.choose import choose_proposer
from aengine.runtime.startup.images import choose_images, whole_image
from aengine.runtime.startup.lora import make_adapter_places, reserve_adapters
from aengine.runtime.startup.ready import Runtime, StartupTimer, log_ready
from aengine.runtime.startup.sizing.pool import CPU_KV_GIB, host_slots, size_pool
from aengine.runtime.startup.sizing.steps import CPU_STEP_TOKENS, image_cost, mixed_limit, step_tokens
from aengine.runtime.startup.sizing.windows import sliding_layers
from aengine.runtime.step.executor import Executor
from aengine.runtime.step.images import make_encoder
from aengine.runtime.step.rows import Rows
from aengine.runtime.weights import load_weights
from aengine.sampling.sampler import Sampler


def start_cpu(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    wait_for_text: Callable[[], object],
    speculation: ProposerChoice | None = None,
) -> Runtime:
    """Load the model.

    Args:
        wait_for_text: As in `start_runtime`.
        speculation: Replaces the proposer that the configuration asks for.

    Raises: ConfigError, CheckpointError.
    """
    timer = StartupTimer()
    device = torch.device("cpu")
    max_step_tokens = step_tokens(config, max(CPU_STEP_TOKENS, config.max_num_seqs + whole_image(config, model)))
    model = choose_images(config, model, folder, max_step_tokens - config.max_num_seqs)
    model = reserve_adapters(config, model)
    if speculation is None:
        model, speculation = choose_proposer(config, model, device, folder)
    model = model.spread_over(1 if config.tensor_parallel_size == "auto" else config.tensor_parallel_size)
    if config.attention not in ("auto", "torch"):
        raise ConfigError(f"attention: {config.attention!r} needs a CUDA device; use auto or torch")
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    memory = host_memory()
    if memory is not None:
        memory //= model.ranks  # each rank has its own pool
    most_drafts = 0 if speculation is None else speculation.most_drafts
    available = int((config.kv_cache_gib or CPU_KV_GIB) * 2**30)
    pool = size_pool(config, model, kv_dtype, available, memory, dtype, most_drafts)
    slots = host_slots(config, model, pool.page_bytes)
    attention = TorchAttention()
    wait_for_text()
    meeting = Meeting(model.ranks)
    placements = (
        [
            Placement(device, TorchKernels(), attention, ThreadCollective(rank, model.ranks, meeting))
            for rank in range(model.ranks)
        ]
        if model.ranks > 1
        else [Placement(device, TorchKernels(), attention)]
    )
    head_folder = None if speculation is None else speculation.head_folder
    longest = pool.max_model_len
    decoders, weights = load_weights(config, folder, model, placements, dtype, kv_dtype, longest, head_folder)
    threads = forward_threads(config.torch_threads, model.parameters)

    shape, sliding = model.kv_shape(config.page_size, kv_dtype), sliding_layers(model, pool.windows)
    pools = [KVPool(shape, pool.num_pages, device, sliding) for _ in decoders]

    def make(decoder: Decoder, kv: KVPool) -> Executor:
        pages = -(-pool.max_model_len // config.page_size)
        adapters, windows = decoder.adapters is not None, pool.windows is not None
        recurrent = pool.states is not None
        shift = decoder.near_shift
        rows = Rows(
            config.max_num_seqs,
            pages,
            device,
            None,
            adapters,
            windows,
            shift,
            most_drafts,
            recurrent,
            model.shifts_positions,
        )
        states = None if pool.states is None else StatePool.in_room(pool.states, device)
        sampler = Sampler(rows.count, model.vocab_size, device)
        proposer = None if speculation is None else speculation.make(ProposerParts(decoder, kv, sampler, rows))
        return StepExecutor(decoder, kv, sampler, rows, states, proposer, make_encoder(config, decoder))

    executor = make(decoders[0], pools[0])
    if model.ranks > 1:
        each = max(1, threads.long // model.ranks)
        executor = RankedExecutor(
            [make(decoder, kv) for decoder, kv in zip(decoders, pools)], ThreadedRanks(meeting, model.ranks, each)
        )
    ranks = "" if model.ranks == 1 else f"{model.ranks} ranks, "
    name = f"cpu ({ranks}{torch.backends.cpu.get_cpu_capability()}, {threads.short} to {threads.long} threads)"
    log_ready(decoders[0], name, attention.name, config, pool, max_step_tokens, timer, speculation)
    return Runtime(
        CpuRunner(executor, threads),
        model,
        pool,
        max_step_tokens,
        mixed_limit(config, model, max_step_tokens),
        adapters=make_adapter_places(
            decoders, [HostFiller() for _ in decoders], None if config.load_format == "dummy" else folder
        ),
        copies=RankedCopies([HostCopier(kv, slots) for kv in pools]) if slots else None,
        dtypes=(str(dtype), str(kv_dtype)),
        weights=weights,
        memory=HostSleep() if config.sleep_mode else None,
        most_drafts=most_drafts,
        speculation="off" if speculation is None else speculation.name,
        image_cost=image_cost(model),
        step_cost=None if speculation is None else speculation.cost,
    )
