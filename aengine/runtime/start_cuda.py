"""A runtime on a CUDA device: load, measure what a step needs, give the rest to the KV pool, capture graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from aengine.attention.flash_backend import choose_prefill
from aengine.attention.triton_backend import TritonAttention
from aengine.cache.kv import KVPool
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.launch import launch_for
from aengine.kernels.triton_kernels import TritonKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.load import load_model
from aengine.runtime.cuda_memory import decode_steps, greediest_steps, narrow_steps, room_for_kv, widest_step
from aengine.runtime.cuda_runner import CudaRunner, GraphedExecutor
from aengine.runtime.decode_graphs import DecodeGraphs, graph_sizes
from aengine.runtime.device import resolve_dtype
from aengine.runtime.prefill_graphs import PrefillGraphs, prefill_sizes
from aengine.runtime.rows import Rows
from aengine.runtime.sizing import size_pool
from aengine.runtime.start import MIXED_MULTIPLE, Runtime, log_model, log_pool, mixed_limit, step_tokens
from aengine.sampling.sampler import Sampler
from aengine.sampling.upload import upload

STEP_TOKENS = 8192
LONG_STEP_TOKENS = 16384
STEP_FLOP = 1.4e14  # 0.2 s or so on an H100 or H200: 8192 tokens of an 8B model
MIXED_STEP_FLOP = 5.1e13  # 75 ms or so on an H100 or H200, which have 132 multiprocessors
# What a multiprocessor's tensor cores do in a cycle, an H100's being 1: by the first digit of the compute capability.
TENSOR_SPEED = {9: 1.0, 10: 2.0}
MOST_CLOSE_TOKENS = 4096  # a longer step takes the device longer than launching its kernels takes the host
GRAPH_BYTES = 8 * 2**20


def default_step_tokens(parameters: int, speed: float) -> int:
    """Prompt tokens in one step: larger products are faster ones, but who comes next waits for them."""
    return LONG_STEP_TOKENS if 2 * parameters * LONG_STEP_TOKENS <= speed * STEP_FLOP else STEP_TOKENS


def default_mixed_tokens(parameters: int, max_step_tokens: int, speed: float) -> int:
    """Prompt tokens that take about as long as a stream should wait, in whole multiples. speed: as `device_speed`."""
    tokens = int(speed * MIXED_STEP_FLOP / (2 * parameters)) // MIXED_MULTIPLE * MIXED_MULTIPLE
    return min(max(tokens, MIXED_MULTIPLE), max_step_tokens)


def device_speed(capability: tuple[int, int], processors: int) -> float:
    """How fast the device multiplies 16-bit matrices, an H100 being 1: a guess from data sheets, clocks aside."""
    each = 0.5 if capability == (8, 0) else TENSOR_SPEED.get(capability[0], 0.25)
    return each * processors / 132


@dataclass(frozen=True, slots=True)
class _GraphSizes:
    """What is captured: batch sizes of decode steps, numbers of tokens of steps with prefill chunks."""

    decode: list[int]
    prefill: list[int]

    @classmethod
    def of(cls, config: EngineConfig, prefill: bool, mixed: int, max_step_tokens: int) -> _GraphSizes:
        if not config.cuda_graphs:
            return cls([], [])
        close = min(mixed, MOST_CLOSE_TOKENS)
        return cls(graph_sizes(config.max_num_seqs), prefill_sizes(close, max_step_tokens) if prefill else [])

    @property
    def largest(self) -> _GraphSizes:
        """The largest of each alone."""
        return _GraphSizes(self.decode[-1:], self.prefill[-1:])

    @property
    def count(self) -> int:
        return len(self.decode) + len(self.prefill)


@torch.inference_mode()
def start_cuda(config: EngineConfig, folder: Path, device: torch.device) -> Runtime:
    """Load the model on `device` and make it ready to serve. Raises `ConfigError` and `CheckpointError`."""
    began = time.perf_counter()
    if config.attention == "torch":
        raise ConfigError("attention: 'torch' waits for the device in every step; use auto or triton on CUDA")
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    # While the weights stream, this thread has little to do: what takes seconds to import comes in beside it.
    with ThreadPoolExecutor(1, "imports") as imports, torch.cuda.stream(stream):
        model = ModelConfig.from_folder(folder)
        dtype = resolve_dtype(config.dtype, device, model.dtype)
        step_tokens(config, STEP_TOKENS)  # what it refuses, before weights are read
        prefill = imports.submit(choose_prefill, device, dtype)
        attention = TritonAttention(prefill.result)
        decoder = load_model(
            folder,
            model,
            device=device,
            dtype=dtype,
            kernels=TritonKernels(),
            attention=attention,
            load_format=config.load_format,
            seed=config.seed,
            progress=config.progress,
            max_positions=config.max_model_len,
        )
        stream.synchronize()
        loaded = time.perf_counter()
        speed = device_speed(torch.cuda.get_device_capability(device), launch_for(device).processors)
        max_step_tokens = step_tokens(config, default_step_tokens(decoder.num_parameters, speed))
        limit = mixed_limit(config, decoder, default_mixed_tokens(decoder.num_parameters, max_step_tokens, speed))
        sizes = _GraphSizes.of(config, attention.capturable, limit.tokens, max_step_tokens)

        def trial(num_pages: int, length: int) -> GraphedExecutor:
            return _executor(config, decoder, device, num_pages, length, sizes.largest, attention.fits)

        # The smaller graphs live in the largest one's memory; each adds its own nodes, and the logits of decodes.
        logits = sum(sizes.decode[:-1]) * model.vocab_size * dtype.itemsize
        more_graphs = sizes.count * GRAPH_BYTES + logits
        room = room_for_kv(config, decoder, max_step_tokens, trial, _capture, more_graphs)
        pool = size_pool(config, model, dtype, room)
        with _asked_for_room(config, max_step_tokens):
            executor = _executor(config, decoder, device, pool.num_pages, pool.max_model_len, sizes, attention.fits)
            # What steps need that fit no captured shape.
            steps = narrow_steps(config, max_step_tokens, pool.max_model_len)
            if config.kv_cache_gib is not None:  # else sizing has run the largest
                steps.append(widest_step(config, max_step_tokens, pool.max_model_len))
            if executor.decode_graphs is None:
                steps += decode_steps(config, max_step_tokens)
            for step in steps:
                executor.execute(step)
            stream.synchronize()
            torch.cuda.empty_cache()
        sized = time.perf_counter()
        _capture(executor, config.progress)
        for step in greediest_steps():  # compiles what no graph holds: the draws that decide something on the host
            executor.execute(step)
        stream.synchronize()
    log_model(decoder, f"{torch.cuda.get_device_name(device)} ({device})", f"{attention.name}, {attention.why}")
    captured = time.perf_counter()
    phases = (
        f"weights {loaded - began:.1f} s, memory {sized - loaded:.1f} s, graphs {captured - sized:.1f} s, "
        f"ready in {captured - began:.1f} s"
    )
    log_pool(config, pool, max_step_tokens, phases)
    runner = CudaRunner(executor, device, stream, max_draws=config.max_num_seqs)
    return Runtime(runner, model, pool, max_step_tokens, limit)


@contextmanager
def _asked_for_room(config: EngineConfig, max_step_tokens: int) -> Iterator[None]:
    """Raises `ConfigError` where a pool of the size that was asked for leaves too little for everything else."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if config.kv_cache_gib is None and config.num_pages is None:
            raise
        knob = "num_pages" if config.kv_cache_gib is None else "kv_cache_gib"
        raise ConfigError(
            f"{knob}: a KV pool of that size leaves no room for a step of {max_step_tokens} tokens; "
            f"lower it or max_step_tokens"
        ) from error


def _executor(
    config: EngineConfig,
    decoder: Decoder,
    device: torch.device,
    num_pages: int,
    max_model_len: int,
    sizes: _GraphSizes,
    fits: Callable[[int, Sequence[int], int], bool],
) -> GraphedExecutor:
    model = decoder.config
    kv = KVPool(
        model.num_layers, num_pages, config.page_size, model.num_kv_heads, model.head_dim, decoder.dtype, device
    )

    def send(values: Sequence[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), device)

    rows = Rows(config.max_num_seqs, -(-max_model_len // config.page_size), device, send)
    sampler = Sampler(rows.count, model.vocab_size, device)
    executor = GraphedExecutor(decoder, kv, sampler, rows)
    memory = torch.cuda.graph_pool_handle()  # for all graphs: only one runs at a time
    if sizes.decode:
        executor.decode_graphs = DecodeGraphs(decoder, kv, sampler, rows, sizes.decode, memory)
    if sizes.prefill:
        executor.prefill_graphs = PrefillGraphs(decoder, kv, rows, sizes.prefill, fits, memory)
    return executor


def _capture(executor: GraphedExecutor, progress: bool) -> None:
    """Record every graph, those of the largest steps first."""
    todo = [
        (graphs, size)
        for graphs in (executor.prefill_graphs, executor.decode_graphs)
        if graphs is not None
        for size in reversed(graphs.sizes)
    ]
    hidden = None if progress else True  # None: unless stderr is a terminal
    for graphs, size in tqdm(todo, "capturing graphs", unit="graph", delay=2, disable=hidden, leave=False):
        graphs.capture(size)
