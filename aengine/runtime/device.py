"""Chooses the device, the dtypes and the number of CPU threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from aengine.errors import ConfigError
from aengine.kernels.kv_scales import FP8

# Compute capabilities of GPUs for which tests compile all kernels, and of those on which kernels were run.
COMPILED_FOR = frozenset({(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)})
RUN_ON = frozenset({(9, 0)})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device that the knob names. `auto` is the first CUDA device, or the CPU if there is none.

    Raises: ConfigError.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            raise ConfigError(f"device: {name!r} was requested, but this machine has {count} usable CUDA devices")
        return torch.device("cuda", index)
    return device


def untried_kernels(capability: tuple[int, int]) -> str:
    """Return a line for the start-up log, if our kernels never ran on GPUs of this kind. Otherwise it is empty."""
    if capability in RUN_ON:
        return ""
    known = "only compiled" if capability in COMPILED_FOR else "never compiled or run"
    return (
        f"kernels: for GPUs of compute capability {capability[0]}.{capability[1]} ours were {known}; if answers look "
        f"wrong, compare them with kernels=torch, which is slow"
    )


def resolve_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """Return the model's dtype. `auto` is the checkpoint's on a GPU, and float32 on a CPU, where it is faster."""
    if name == "auto":
        name = checkpoint if device.type == "cuda" else "float32"
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ConfigError(f"dtype: the checkpoint's {name!r} is not supported; set float32, bfloat16 or float16")
    return dtype


def resolve_kv_dtype(name: str, dtype: torch.dtype, capability: tuple[int, int] | None = None) -> torch.dtype:
    """Return the dtype of keys and values for a model in `dtype`.

    capability: the GPU's. None means the CPU.

    Raises: ConfigError if the device has no FP8.
    """
    if name == "auto":
        return dtype
    if capability is not None and capability < (8, 9):
        raise ConfigError(
            f"kv_cache_dtype: {name!r} needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), this "
            f"one has {capability[0]}.{capability[1]}; use auto"
        )
    return FP8


def host_memory() -> int | None:
    """Return the bytes of memory of this machine, or None if they are unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no such call, or no such name
        return None


@dataclass(frozen=True, slots=True)
class ForwardThreads:
    """How many threads a step on a CPU uses.

    A short step leaves one core to the event loop. A long step (a prefill or a large batch) uses all cores. The
    operating system still schedules the loop, which is mostly idle.
    """

    short: int
    long: int
    long_tokens: int  # a step with at least this many tokens is long

    def for_step(self, tokens: int) -> int:
        """Return the number of threads for a step with `tokens` tokens."""
        return self.long if tokens >= self.long_tokens else self.short


LONG_STEP_FLOP = 1e9  # 10 to 20 ms on one core


def forward_threads(configured: int | None, parameters: int) -> ForwardThreads:
    """Return the configured number of threads for every step, or choose numbers by the model's parameter count."""
    if configured is not None:
        return ForwardThreads(configured, configured, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ForwardThreads(max(1, cores - 1), cores, max(2, round(LONG_STEP_FLOP / (2 * parameters))))
