"""Starts a runtime with torch's kernels, on the CPU or on one GPU. It computes in one worker thread.

On a GPU every step waits for the device, and is launched kernel by kernel. So this is for comparisons, and for GPUs on
which our own kernels fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from aengine.attention.torch_backend import TorchAttention
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.loading.load import Placement
from aengine.runtime.adapters import HostFiller
from aengine.runtime.device import forward_threads, host_memory, resolve_dtype, resolve_kv_dtype
from aengine.runtime.page_copies import HostCopier, PageCopies
from aengine.runtime.ranks import RankedExecutor, ThreadedRanks
from aengine.runtime.runner import CpuRunner, StepExecutor
from aengine.runtime.sleep import HostSleep
from aengine.runtime.speculation.base import ProposerChoice
from aengine.runtime.speculation.choose import choose_proposer
from aengine.runtime.startup.images import choose_images, whole_image
from aengine.runtime.startup.lora import make_adapter_places, reserve_adapters
from aengine.runtime.startup.ready import Runtime, StartupTimer, log_ready
from aengine.runtime.startup.sizing.pool import CPU_KV_GIB, host_slots, size_pool
from aengine.runtime.startup.sizing.steps import CPU_STEP_TOKENS, image_cost, mixed_limit, step_tokens
from aengine.runtime.step.executor import Executor
from aengine.runtime.weights import load_weights

CPU = torch.device("cpu")
# Knobs that need kernels or copies of our own on a GPU, with the only value that torch's kernels support.
_GPU_KNOBS: dict[str, object] = {
    "tensor_parallel_size": 1,
    "host_cache_gib": 0.0,
    "disk_cache_dir": None,
    "sleep_mode": False,
    "lora": {},
    "lora_loading": False,
}


def start_torch(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    begin_text: Callable[[], object],
    speculation: ProposerChoice | None = None,
    device: torch.device = CPU,
) -> Runtime:
    """Load the model.

    Args:
        begin_text: As in `start_runtime`.
        speculation: Replaces the proposer that the configuration asks for.

    Raises: ConfigError, CheckpointError.
    """
    timer = StartupTimer()
    on_gpu = device.type == "cuda"
    if on_gpu:
        config = _for_gpu(config)
        torch.cuda.set_device(device)
    max_step_tokens = step_tokens(config, max(CPU_STEP_TOKENS, config.max_num_seqs + whole_image(config, model)))
    model = choose_images(config, model, folder, max_step_tokens - config.max_num_seqs)
    model = reserve_adapters(config, model)
    if speculation is None:
        model, speculation = choose_proposer(config, model, device, folder)
    model = model.spread_over(1 if config.tensor_parallel_size == "auto" else config.tensor_parallel_size)
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    kv_dtype = resolve_kv_dtype(
        config.kv_cache_dtype, dtype, torch.cuda.get_device_capability(device) if on_gpu else None
    )
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else host_memory()
    if memory is not None:
        memory //= model.ranks  # each rank has its own pool
    most_drafts = speculation.most_drafts
    if on_gpu and config.kv_cache_gib is None:
        available = _room_on_gpu(device, config.gpu_memory_utilization, model.weight_bytes(dtype))
    else:
        available = int((config.kv_cache_gib or CPU_KV_GIB) * 2**30)
    pool = size_pool(config, model, kv_dtype, available, memory, dtype, most_drafts)
    slots = host_slots(config, model, pool.page_bytes)
    attention = TorchAttention()
    begin_text()
    meeting = Meeting(model.ranks)
    placements = (
        [
            Placement(device, TorchKernels(), attention, ThreadCollective(rank, model.ranks, meeting))
            for rank in range(model.ranks)
        ]
        if model.ranks > 1
        else [Placement(device, TorchKernels(), attention)]
    )
    decoders, weights = load_weights(
        config, folder, model, placements, dtype, kv_dtype, pool.max_model_len, speculation.head_folder
    )
    threads = forward_threads(config.torch_threads, model.parameters)

    executors = [
        StepExecutor.make(
            config,
            decoder,
            pool.num_pages,
            pool.max_model_len,
            pool.states,
            pool.windows,
            speculation,
            use_kernels=False,
        )
        for decoder in decoders
    ]
    executor: Executor = executors[0]
    if model.ranks > 1:
        each = max(1, threads.long // model.ranks)
        executor = RankedExecutor(executors, ThreadedRanks(meeting, model.ranks, each))
    ranks = "" if model.ranks == 1 else f"{model.ranks} ranks, "
    name = f"cpu ({ranks}{torch.backends.cpu.get_cpu_capability()}, {threads.short} to {threads.long} threads)"
    if on_gpu:
        name = f"{torch.cuda.get_device_name(device)} ({device})"
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
        copies=PageCopies([HostCopier(rank.kv, slots) for rank in executors]) if slots else None,
        dtypes=(str(dtype), str(kv_dtype)),
        weights=weights,
        memory=HostSleep() if config.sleep_mode else None,
        speculation=speculation,
        image_cost=image_cost(model),
    )


def _for_gpu(config: EngineConfig) -> EngineConfig:
    """Return the configuration for torch's kernels on a GPU. Raises `ConfigError` if they do not support a knob."""
    if config.tensor_parallel_size == "auto":
        config = replace(config, tensor_parallel_size=1)
    for knob, value in _GPU_KNOBS.items():
        if getattr(config, knob) != value:
            raise ConfigError(f"{knob}: on a GPU it needs kernels of our own; leave out kernels=torch, or {knob}")
    if config.speculation not in ("auto", "off"):
        raise ConfigError(
            "speculation: on a GPU it needs kernels of our own; leave out kernels=torch, or set it to off"
        )
    return replace(config, speculation="off")


def _room_on_gpu(device: torch.device, utilization: float, weights: int) -> int:
    """Return bytes for keys and values: half of what weights leave. Steps without a plan for memory use the rest."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free) - weights) // 2
