"""From knobs and a checkpoint folder to a runner that takes steps."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.cache.kv import KVPool
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.load import load_model
from aengine.runtime.device import forward_threads, resolve_device, resolve_dtype
from aengine.runtime.rows import Rows
from aengine.runtime.runner import CpuRunner, Runner, StepExecutor
from aengine.runtime.sizing import CPU_KV_GIB, PoolSize, size_pool
from aengine.sampling.sampler import Sampler

log = logging.getLogger("aengine")

CPU_STEP_TOKENS = 512  # a chunk of a long prompt takes about as long as a stream tolerates waiting


@dataclass(frozen=True, slots=True)
class Runtime:
    """A loaded model on a device, ready to run steps."""

    runner: Runner
    model: ModelConfig
    pool: PoolSize
    max_step_tokens: int


def start_runtime(config: EngineConfig, folder: Path) -> Runtime:
    """Load the model and make its state. Blocks for as long as that takes; call it off the loop.

    Raises `ConfigError` and `CheckpointError`.
    """
    began = time.perf_counter()
    device = resolve_device(config.device)
    model = ModelConfig.from_folder(folder)
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    max_step_tokens = config.max_step_tokens or max(CPU_STEP_TOKENS, config.max_num_seqs)
    if max_step_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_step_tokens: {max_step_tokens} is below max_num_seqs ({config.max_num_seqs}), so that a step "
            f"could not carry every running sequence; raise it or lower max_num_seqs"
        )
    pool = size_pool(config, model, dtype, int((config.kv_cache_gib or CPU_KV_GIB) * 2**30))
    attention = TorchAttention()
    decoder = load_model(
        folder,
        model,
        device=device,
        dtype=dtype,
        kernels=TorchKernels(),
        attention=attention,
        load_format=config.load_format,
        seed=config.seed,
        progress=config.progress,
        max_positions=pool.max_model_len,
    )
    kv = KVPool(model.num_layers, pool.num_pages, config.page_size, model.num_kv_heads, model.head_dim, dtype, device)
    rows = Rows(config.max_num_seqs, -(-pool.max_model_len // config.page_size), device)
    executor = StepExecutor(decoder, kv, Sampler(config.max_num_seqs + 1, model.vocab_size, device), rows)
    threads = forward_threads(config.torch_threads)
    log.info(
        "%s on %s (%s, %d threads), %s in %s, attention: %s",
        model.architecture,
        device,
        torch.backends.cpu.get_cpu_capability(),
        threads,
        f"{decoder.num_parameters / 1e6:.1f} M parameters",
        str(dtype).removeprefix("torch."),
        attention.name,
    )
    log.info(
        "KV pool: %d pages of %d tokens (%.0f MiB), context %d, up to %d rows, %d tokens per step; ready in %.1f s",
        pool.num_pages - 1,
        config.page_size,
        pool.bytes / 2**20,
        pool.max_model_len,
        config.max_num_seqs,
        max_step_tokens,
        time.perf_counter() - began,
    )
    return Runtime(CpuRunner(executor, threads), model, pool, max_step_tokens)
