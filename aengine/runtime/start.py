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
from aengine.model.decoder import Decoder
from aengine.model.load import load_model
from aengine.runtime.device import forward_threads, resolve_device, resolve_dtype
from aengine.runtime.rows import Rows
from aengine.runtime.runner import CpuRunner, Runner, StepExecutor
from aengine.runtime.sizing import CPU_KV_GIB, PoolSize, size_pool
from aengine.sampling.sampler import Sampler
from aengine.types import MixedLimit

log = logging.getLogger("aengine")

CPU_STEP_TOKENS = 512  # a chunk of a long prompt takes about as long as a stream tolerates waiting
MIXED_MULTIPLE = 128  # tokens: matrix products come in such tiles, and prefill graphs in such steps


@dataclass(frozen=True, slots=True)
class Runtime:
    """A loaded model on a device, ready to run steps."""

    runner: Runner
    model: ModelConfig
    pool: PoolSize
    max_step_tokens: int
    mixed_limit: MixedLimit | None = None  # None: a step that also decodes is as large as any


def start_runtime(config: EngineConfig, folder: Path) -> Runtime:
    """Load the model and make its state. Blocks for as long as that takes; call it off the loop.

    Raises `ConfigError` and `CheckpointError`.
    """
    device = resolve_device(config.device)
    if device.type == "cuda":
        from aengine.runtime.start_cuda import start_cuda  # brings Triton, which a CPU has no use for

        return start_cuda(config, folder, device)
    return start_cpu(config, folder)


def start_cpu(config: EngineConfig, folder: Path) -> Runtime:
    """A runtime that computes in one worker thread."""
    began = time.perf_counter()
    device = torch.device("cpu")
    if config.attention not in ("auto", "torch"):
        raise ConfigError(f"attention: {config.attention!r} needs a CUDA device; use auto or torch")
    model = ModelConfig.from_folder(folder)
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    max_step_tokens = step_tokens(config, CPU_STEP_TOKENS)
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
    executor = StepExecutor(decoder, kv, Sampler(rows.count, model.vocab_size, device), rows)
    threads = forward_threads(config.torch_threads, decoder.num_parameters)
    log_model(
        decoder,
        f"cpu ({torch.backends.cpu.get_cpu_capability()}, {threads.short} to {threads.long} threads)",
        attention.name,
    )
    log_pool(config, pool, max_step_tokens, f"ready in {time.perf_counter() - began:.1f} s")
    return Runtime(
        CpuRunner(executor, threads), model, pool, max_step_tokens, mixed_limit(config, decoder, max_step_tokens)
    )


def mixed_limit(config: EngineConfig, decoder: Decoder, default: int) -> MixedLimit:
    """How many prompt tokens go beside decodes: as many as asked for, or `default`."""
    model = decoder.config
    # Multiply-adds of one token in the layers' products, and with one key in attention.
    products = decoder.num_parameters - (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    attention = 2 * model.num_layers * model.num_heads * model.head_dim
    return MixedLimit(config.max_mixed_tokens or default, products / attention, MIXED_MULTIPLE)


def step_tokens(config: EngineConfig, default: int) -> int:
    """The most tokens in one step. Raises `ConfigError` if a step could not carry every running sequence."""
    tokens = config.max_step_tokens or max(default, config.max_num_seqs)
    if tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_step_tokens: {tokens} is below max_num_seqs ({config.max_num_seqs}), so that a step "
            f"could not carry every running sequence; raise it or lower max_num_seqs"
        )
    return tokens


def log_model(decoder: Decoder, device: str, attention: str) -> None:
    """The first line of the start-up log."""
    log.info(
        "%s, %.1f M parameters in %s, on %s; attention: %s",
        decoder.config.architecture,
        decoder.num_parameters / 1e6,
        str(decoder.dtype).removeprefix("torch."),
        device,
        attention,
    )


def log_pool(config: EngineConfig, pool: PoolSize, max_step_tokens: int, phases: str) -> None:
    """The second one."""
    log.info(
        "KV pool: %d pages of %d tokens (%.0f MiB), context %d, up to %d rows, %d tokens per step; %s",
        pool.num_pages - 1,
        config.page_size,
        pool.bytes / 2**20,
        pool.max_model_len,
        config.max_num_seqs,
        max_step_tokens,
        phases,
    )
