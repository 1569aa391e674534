"""A runtime on a CUDA device: load, measure what a step needs, give the rest to the KV pool, capture graphs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from aengine.attention.triton_backend import TritonAttention
from aengine.cache.kv import KVPool
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.triton_kernels import TritonKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.load import load_model
from aengine.runtime.cuda_runner import CudaRunner, GraphedExecutor
from aengine.runtime.decode_graphs import DecodeGraphs, graph_sizes
from aengine.runtime.device import resolve_dtype
from aengine.runtime.rows import Rows
from aengine.runtime.sizing import size_pool
from aengine.runtime.start import Runtime, log_model, log_pool, step_tokens
from aengine.sampling.sampler import Sampler
from aengine.sampling.upload import upload
from aengine.types import NewRow, PrefillChunk, SamplingParams, StepPlan

CUDA_STEP_TOKENS = 8192
MARGIN = 256 * 2**20  # what libraries allocate on first use, beyond what a trial step shows


@torch.inference_mode()
def start_cuda(config: EngineConfig, folder: Path, device: torch.device) -> Runtime:
    """Load the model on `device` and make it ready to serve. Raises `ConfigError` and `CheckpointError`."""
    began = time.perf_counter()
    if config.attention == "torch":
        raise ConfigError("attention: 'torch' waits for the device in every step; use auto or triton on CUDA")
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        model = ModelConfig.from_folder(folder)
        dtype = resolve_dtype(config.dtype, device, model.dtype)
        max_step_tokens = step_tokens(config, CUDA_STEP_TOKENS)
        attention = TritonAttention(device, dtype)
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
        pool = size_pool(config, model, dtype, _room_for_kv(config, decoder, device, max_step_tokens))
        executor = _executor(config, decoder, device, pool.num_pages, pool.max_model_len)
        sized = time.perf_counter()
        graphs = executor.graphs
        if graphs is not None:
            graphs.capture(
                lambda sizes: tqdm(sizes, desc="capturing graphs", unit="graph", delay=2, disable=not config.progress)
            )
            stream.synchronize()
    log_model(decoder, f"{torch.cuda.get_device_name(device)} ({device})", f"{attention.name}, {attention.why}")
    captured = time.perf_counter()
    phases = (
        f"weights {loaded - began:.1f} s, memory {sized - loaded:.1f} s, graphs {captured - sized:.1f} s, "
        f"ready in {captured - began:.1f} s"
    )
    log_pool(config, pool, max_step_tokens, phases)
    runner = CudaRunner(executor, device, stream, max_draws=config.max_num_seqs)
    return Runtime(runner, model, pool, max_step_tokens)


def _executor(
    config: EngineConfig, decoder: Decoder, device: torch.device, num_pages: int, max_model_len: int
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
    if config.cuda_graphs:
        executor.graphs = DecodeGraphs(decoder, kv, sampler, rows, graph_sizes(config.max_num_seqs))
    return executor


def _room_for_kv(config: EngineConfig, decoder: Decoder, device: torch.device, max_step_tokens: int) -> int:
    """Bytes that are left for the KV pool once weights, the largest step and the graphs have theirs.

    Runs the largest step and captures the largest graph over a small pool of its own, and looks at what that took.
    """
    budget = int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization)
    weights = torch.cuda.memory_allocated(device)
    outside = (
        torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    )
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    length = min(-(-max_step_tokens // config.max_num_seqs), decoder.config.max_position_embeddings)
    pages_per_row = -(-length // config.page_size)
    num_pages = config.max_num_seqs * pages_per_row + 1
    page_bytes = KVPool.bytes_per_page(
        decoder.config.num_layers,
        config.page_size,
        decoder.config.num_kv_heads,
        decoder.config.head_dim,
        decoder.dtype,
    )
    trial = _executor(config, decoder, device, num_pages, length)
    torch.cuda.reset_peak_memory_stats(device)
    trial.execute(_largest_step(config.max_num_seqs, length, pages_per_row, max_step_tokens))
    torch.cuda.current_stream(device).synchronize()
    step = torch.cuda.max_memory_allocated(device) - weights - num_pages * page_bytes
    torch.cuda.empty_cache()
    graphs = 0
    if trial.graphs is not None:
        before = torch.cuda.mem_get_info(device)[0]
        trial.graphs.sizes = trial.graphs.sizes[-1:]
        trial.graphs.capture()
        # The smaller graphs live in the largest one's memory; each adds its own nodes and little else.
        graphs = before - torch.cuda.mem_get_info(device)[0] + len(graph_sizes(config.max_num_seqs)) * 8 * 2**20
    del trial
    torch.cuda.empty_cache()
    room = budget - outside - weights - step - graphs - MARGIN
    if room <= 0:
        gib = 2.0**30
        raise ConfigError(
            f"gpu_memory_utilization: the model does not fit. Of {budget / gib:.1f} GiB "
            f"({config.gpu_memory_utilization:.0%} of the device) others use {outside / gib:.1f}, the weights "
            f"{weights / gib:.1f}, the largest step {step / gib:.1f}, the graphs {graphs / gib:.1f}: nothing is left "
            f"for the KV pool. Raise it, lower max_step_tokens or max_num_seqs, or take a smaller model"
        )
    return room


def _largest_step(rows: int, length: int, pages_per_row: int, max_step_tokens: int) -> StepPlan:
    """Every row at once prefills `length` tokens and draws, as many as one step may carry."""
    rows = min(rows, max(1, max_step_tokens // length))
    new_rows = [
        NewRow(
            row=row,
            params=SamplingParams(),
            seed=row,
            stop_ids=(),
            prompt_len=length,
            tokens=[0] * length,
            length=0,
            pages=list(range(1 + row * pages_per_row, 1 + (row + 1) * pages_per_row)),
        )
        for row in range(rows)
    ]
    prefill = [PrefillChunk(row=row, start=0, token_ids=[0] * length, samples=True) for row in range(rows)]
    return StepPlan(
        step=0, new_rows=new_rows, new_pages=[], decode=[], prefill=prefill, page_copies=[], max_context=length
    )
