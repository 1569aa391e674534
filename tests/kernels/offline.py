"""Lets tests handle every launch of Triton kernels, without a GPU. Triton's compiler needs none."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

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
