"""Lets tests handle every launch of Triton kernels, without a GPU. Triton's compiler needs none."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aengine import kernels
from aengine.kernels import elementwise, launch
from aengine.kernels.launch import Launch
from aengine.kernels.offline import OfflineDriver

MODULES = [
    importlib.import_module(found.name) for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
]
KERNELS = [module for module in MODULES if hasattr(module, "launch_for") and module is not launch]
H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024, capability=(9, 0))
MARKS = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(
        not isinstance(elementwise._rms_norm_kernel.jit, JITFunction), reason="the interpreter compiles nothing"
    ),
]


def take_over(
    monkeypatch: pytest.MonkeyPatch, offline: OfflineDriver, launch: Launch, run: Callable[..., None]
) -> None:
    """Let kernels see a device like `launch`, and turn every launch into `run(kernel, *args, **options)`."""
    for module in KERNELS:
        monkeypatch.setattr(module, "launch_for", lambda device: launch)
    monkeypatch.setattr(driver, "_active", offline)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: run(kernel, *args, **options))


def record_variants(monkeypatch: pytest.MonkeyPatch, device: int) -> dict[str, set[str]]:
    """Compile nothing, and return the variants of kernels that are launched from now on on an H200, by the name.

    device: a number that no other test uses, because kernels remember variants by device.
    """
    offline = OfflineDriver(90, device)
    variants: dict[str, set[str]] = defaultdict(set)

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = kernel.device_caches[offline.get_current_device()]
        _, specialization, chosen = binder(*args, **options)
        variants[kernel.fn.__name__].add(f"{specialization} {chosen}")

    take_over(monkeypatch, offline, H200, launched)
    return variants
