"""Starts a runtime on CUDA devices: loads weights, measures a step, sizes the KV pool, captures graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.cache import triton_key

from aengine.attention.flash_backend import choose_prefill
from aengine.attention.triton_backend import TritonAttention
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.kv_scales import FP8
from aengine.kernels.launch import launch_for
from aengine.kernels.triton_kernels import TritonKernels
from aengine.model.config import ModelConfig
from aengine.model.loading.load import Placement
from aengine.model.lora.memory import Adapter
from aengine.model.spec.attention import AttentionSpec
from aengine.runtime.cuda.adapters import DeviceFiller
from aengine.runtime.cuda.capture import Executors, GraphSizes, capture, make_executor
from aengine.runtime.cuda.page_copies import DeviceCopier, pin_in_thread
from aengine.runtime.cuda.ranks import DeviceRanks, keep_pinned_memory, keep_small_memory
from aengine.runtime.cuda.runner import CudaRunner
from aengine.runtime.cuda.sleep import CudaSleep
from aengine.runtime.device import resolve_dtype, resolve_kv_dtype, untried_kernels
from aengine.runtime.page_copies import PageCopies
from aengine.runtime.speculation.base import ProposerChoice
from aengine.runtime.speculation.choose import choose_proposer
from aengine.runtime.startup.compiling.compile_ahead import CompileAhead, compile_ahead
from aengine.runtime.startup.compiling.job import Job
from aengine.runtime.startup.drafted_steps import drafted_steps, largest_drafted_steps
from aengine.runtime.startup.gpus import choose_gpus
from aengine.runtime.startup.image_steps import image_steps, with_largest_images
from aengine.runtime.startup.images import choose_images
from aengine.runtime.startup.libraries import load_libraries
from aengine.runtime.startup.lora import make_adapter_places, reserve_adapters
from aengine.runtime.startup.ready import Runtime, StartupTimer, log_ready
from aengine.runtime.startup.sizing.cuda_memory import GIB, Budget, room_for_kv
from aengine.runtime.startup.sizing.pool import check_length, host_slots, size_pool
from aengine.runtime.startup.sizing.states import states_of_rows
from aengine.runtime.startup.sizing.steps import STEP_TOKENS, StepSizes, image_cost, step_tokens
from aengine.runtime.startup.sizing.windows import trial_windows
from aengine.runtime.startup.unpacked_copies import with_copies
from aengine.runtime.startup.warm_up import (
    greediest_largest_step,
    greediest_steps,
    uncaptured_steps,
    widest_step,
    with_adapters,
)
from aengine.runtime.weights import load_weights

if TYPE_CHECKING:
    from aengine.kernels.collective.peers import PeerCollective

log = logging.getLogger("aengine")

PATIENCE = 2.5  # seconds that a GPU waits for another GPU; the host launches on all of them in far less


@torch.inference_mode()
def start_cuda(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    device: torch.device,
    wait_for_libraries: Callable[[], object],
    begin_text: Callable[[], object],
) -> Runtime:
    """Load the model on `device` and make it ready to serve.

    wait_for_libraries: waits until another thread has set up the libraries of `load_libraries`. begin_text: as in
    `start_runtime`.

    Raises: ConfigError, CheckpointError.
    """
    timer = StartupTimer()
    capability = torch.cuda.get_device_capability(device)
    if untried := untried_kernels(capability):
        log.warning("%s", untried)
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, capability)
    least_step = step_tokens(config, STEP_TOKENS)
    longest = check_length(config, model)  # refuses bad settings before weights are read
    _check_heads(model)
    torch.cuda.set_device(device)
    model = choose_images(config, model, folder, least_step - config.max_num_seqs)
    model = reserve_adapters(config, model)
    model, speculation = choose_proposer(config, model, device, folder)
    most_drafts = speculation.most_drafts
    gpus = choose_gpus(config, model, dtype, device)
    model = with_copies(config, model.spread_over(len(gpus)), dtype, gpus)
    lora = model.lora is not None
    if config.num_pages is not None or config.kv_cache_gib is not None:
        kv_bytes = int((config.kv_cache_gib or 0) * GIB)
        size_pool(config, model, kv_dtype, kv_bytes, torch.cuda.mem_get_info(device)[1], dtype)
    page_bytes = model.kv_shape(config.page_size, kv_dtype).page_bytes
    slots = host_slots(config, model, page_bytes)
    collectives = _connect(gpus)
    devices = DeviceRanks([torch.cuda.Stream(gpu) for gpu in gpus], collectives)
    memory = CudaSleep(gpus) if config.sleep_mode else None
    job = _job(config, model, dtype, device, speculation)
    # This thread has little to do while the weights stream, so slow imports happen meanwhile.
    with (
        compile_ahead(job) as ahead,
        ThreadPoolExecutor(1, "imports") as imports,
        ThreadPoolExecutor(1, "digest") as hashing,
        pin_in_thread(slots * page_bytes, gpus) as pinned,
        devices.current(),
    ):
        keyed = hashing.submit(triton_key)  # hashes all of Triton's files in 0.35 s without the GIL; Triton caches it
        # This thread records graphs, and cuBLAS cannot be set up during a recording.
        for gpu in gpus if len(gpus) > 1 else ():
            load_libraries(gpu, dtype, reads=False)
        wait_for_libraries()
        timer.end("libraries")
        prefill_bound = longest if kv_dtype == FP8 else 0
        choices = [partial(choose_prefill, gpu, dtype, prefill_bound) for gpu in gpus]
        # Latent attention has our own kernel and needs no package.
        attention = [
            TritonAttention(one if model.latents else imports.submit(one).result, most_drafts > 0) for one in choices
        ]
        placements = [
            Placement(gpu, TritonKernels(model.unpacked_copies), one, ranks)
            for gpu, one, ranks in zip(gpus, attention, collectives or (None,))
        ]
        begin_text()
        with nullcontext() if memory is None else memory.weights.use():
            decoders, weights = load_weights(
                config, folder, model, placements, dtype, kv_dtype, config.max_model_len, speculation.head_folder
            )
        devices.synchronize()
        torch.cuda.empty_cache()  # pools and graphs use separate memory
        if memory is not None:
            memory.weights.trim()
        timer.end("weights")
        steps = StepSizes.from_config(config, model, job.capability, job.launch.processors)
        sizes = GraphSizes.from_config(
            config, attention[0].capturable, steps.mixed.tokens, steps.most, model.ranks, lora, most_drafts
        )
        timer.end("imports")
        keyed.result()
        ahead.wait()
        timer.end("kernels")

        of_ranks = [
            partial(make_executor, config, decoder, fits=one.fits, speculation=speculation)
            for decoder, one in zip(decoders, attention)
        ]

        def make(num_pages: int, length: int, **parts: Any) -> Executors:
            calls = [partial(one, num_pages, length, **parts) for one in of_ranks]
            return Executors(devices(calls, short=True), devices)

        rows_alone = states_of_rows(config, model, dtype, most_drafts)
        trial = partial(make, sizes=sizes.largest, states=rows_alone, windows=trial_windows(config, model, kv_dtype))
        known = ahead.needs(gpus)
        try:
            room, needs = room_for_kv(
                config, decoders, steps.most, trial, sizes.node_bytes, rows_alone, known, most_drafts
            )
        except ConfigError:
            ahead.forget()  # other processes may have taken memory since it was measured
            raise
        pool = size_pool(config, model, kv_dtype, room, dtype=dtype, most_drafts=most_drafts)
        with _pool_size_errors(config, steps.most, ahead):
            pools = nullcontext if memory is None else memory.kv.use
            length = pool.max_model_len
            executors = make(pool.num_pages, length, sizes=sizes, states=pool.states, windows=pool.windows, pools=pools)
            uncaptured = uncaptured_steps(config, model, dtype, job.launch, steps.most, length, sizes, most_drafts)
            uncaptured += image_steps(config, model, steps.most, length)
            drafted = drafted_steps(config, model, dtype, job.launch, steps.most, length, most_drafts)
            if known is not None and config.kv_cache_gib is None:  # the largest step has not run yet
                uncaptured.append(widest_step(config, steps.most, length))
            # With several ranks, a rehearsal launches other kernels for sums than a step.
            with decoders[0].rehearsals() if len(gpus) == 1 else nullcontext():
                executors.warm_up(with_adapters(uncaptured, lora))
            torch.cuda.empty_cache()
            timer.end("memory")
            capture(executors, config.progress)
            # Graphs hold only CAPTURED_KINDS of draws. This compiles the kernels of the other kinds.
            executors.warm_up(with_adapters(greediest_steps(), lora))
            executors.warm_up(with_adapters(drafted, lora), replays_ends=False)
        if collectives:  # torch must cache all memory that steps need: allocating more may wait for other devices
            largest = with_largest_images(config, model, [greediest_largest_step(config, steps.most, length)])
            largest_drafted = largest_drafted_steps(config, steps.most, length, most_drafts)
            with _pool_size_errors(config, steps.most, ahead):
                executors.warm_up(with_adapters([*largest, *largest_drafted], lora), replays_ends=False)
            for gpu in gpus:
                keep_small_memory(gpu)
            keep_pinned_memory(len(gpus))
            devices.wait_for_each_other(PATIENCE)
            executors.warm_up(with_adapters(greediest_steps(), lora))  # the first steps with meaningful results
            devices.check_answers()
        fillers = [DeviceFiller(gpu, torch.cuda.Stream(gpu)) for gpu in gpus] if lora else []
        adapters = make_adapter_places(decoders, fillers, None if config.load_format == "dummy" else folder)
        if adapters is not None:
            adapters.fill(Adapter(0, {}), 1)  # loads the kernels of copies
        timer.end("graphs")
        copies = None
        if slots:
            copiers = [DeviceCopier(rank.kv, one, slots) for rank, one in zip(executors.ranks, pinned(), strict=True)]
            copies = PageCopies(copiers)
            copies.copy_to_host([0], [0])  # loads the kernels of copies
            copies.copy_to_device([0], [0])
            timer.end("host memory")
        ahead.keep(gpus, needs)
    name = ", ".join(f"{torch.cuda.get_device_name(gpu)} ({gpu})" for gpu in gpus)
    log_ready(
        decoders[0], name, f"{attention[0].name}, {attention[0].why}", config, pool, steps.most, timer, speculation
    )
    failed = [rank.failed for rank in collectives]
    runner = CudaRunner(executors.all, devices.streams, config.max_num_seqs * (1 + most_drafts), failed)
    return Runtime(
        runner, model, pool, steps.most, steps.mixed, adapters, copies, (str(dtype), str(kv_dtype)),
        weights, memory, speculation, image_cost(model),
    )  # fmt: skip


def _connect(gpus: Sequence[torch.device]) -> list[PeerCollective]:
    """Return the collectives of several GPUs, in which kernels do not wait yet."""
    if len(gpus) == 1:
        return []
    from aengine.kernels.collective.peers import connect

    return connect(gpus, patience=0)


def _check_heads(model: ModelConfig) -> None:
    """Raise ConfigError if our kernels do not support the model's heads."""
    for one in model.attending:
        if isinstance(one, AttentionSpec) and (one.head_dim % 2 or not 16 <= one.head_dim <= 512):
            raise ConfigError(
                f"model: its heads have {one.head_dim} elements; a GPU supports even numbers from 16 to 512 "
                f"(device='cpu' supports all)"
            )


def _job(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    speculation: ProposerChoice,
) -> Job:
    """Return the job for processes that compile the kernels. Call it before weights are read."""
    weights = model.weight_bytes(dtype)
    left = Budget.measure(device, config.gpu_memory_utilization).left(weights)
    return Job(
        config=config,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        capability=torch.cuda.get_device_capability(device),
        launch=launch_for(device),
        kv_bytes=left if config.kv_cache_gib is None else int(config.kv_cache_gib * GIB),
        proposer=speculation.name,
        most_drafts=speculation.most_drafts,
    )


@contextmanager
def _pool_size_errors(config: EngineConfig, max_step_tokens: int, ahead: CompileAhead) -> Iterator[None]:
    """Turn running out of memory into ConfigError if the size of the KV pool is configured."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if config.kv_cache_gib is None and config.num_pages is None:
            ahead.forget()  # the memory that an earlier start-up measured may be too little
            raise
        knob = "num_pages" if config.kv_cache_gib is None else "kv_cache_gib"
        raise ConfigError(
            f"{knob}: a KV pool of that size leaves no room for a step of {max_step_tokens} tokens; "
            f"lower it or max_step_tokens"
        ) from error
