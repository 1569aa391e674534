"""Which device, which dtype, how many threads."""

from __future__ import annotations

import os

import torch

from aengine.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises `ConfigError`."""
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
            raise ConfigError(f"device: {name!r} was asked for, this machine has {count} usable CUDA devices")
        return torch.device("cuda", index)
    return device


def resolve_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU and float32 on a CPU, where it is the faster one."""
    if name == "auto":
        name = checkpoint if device.type == "cuda" else "float32"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ConfigError(f"dtype: the checkpoint's {name!r} is not supported; ask for float32, bfloat16 or float16")
    return dtype


def forward_threads(asked: int | None) -> int:
    """Threads of the forward pass on a CPU: one core is left to the event loop."""
    return asked or max(1, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 1)
