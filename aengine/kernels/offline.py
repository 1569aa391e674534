"""Triton without a GPU: what is launched is compiled into Triton's cache on disk, and does not run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from aengine.kernels.launch import Launch


class OfflineDriver:
    """What Triton asks a driver for. device: a number of its own, as kernels keep by it what they have compiled."""

    def __init__(self, capability: int, device: int) -> None:
        self._capability = capability
        self._device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


class Share:
    """Which variants of kernels this process compiles: every `count`-th of those that are launched, from `index` on.

    Several processes that launch the same divide the work without a word between them.
    """

    def __init__(self, index: int, count: int) -> None:
        self._index = index
        self._count = count
        self._seen: set[tuple[int, str]] = set()

    def takes(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether it is this process's variant, and asked for the first time."""
        binder = kernel.device_caches[driver.active.get_current_device()][-1]
        _, specialization, chosen = binder(*args, **options)
        variant = (id(kernel), f"{specialization} {chosen}")
        if variant in self._seen:
            return False
        self._seen.add(variant)
        return len(self._seen) % self._count == self._index % self._count


@contextmanager
def compiling(capability: tuple[int, int], launch: Launch, share: Share, threads: int) -> Iterator[None]:
    """For the rest of this process launches of Triton kernels, of tensors on the meta device, compile them instead.

    Within, that is only begun; all of them are done afterwards. Triton gives up the GIL for nine tenths of the work.
    """
    major, minor = capability
    driver.set_active(OfflineDriver(10 * major + minor, device=0))
    _pretend(major, minor, launch)
    leave_out_compiler()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if share.takes(kernel, args, options):
            compiled.append(run(kernel, *args, grid=grid, warmup=True, **options))

    compiled: list[Any] = []
    stubs: list[Future[None]] = []
    JITFunction.run = compile_only
    with ThreadPoolExecutor(threads, "compile") as pool:
        with triton.AsyncCompileMode(pool):
            yield
        signatures = {tuple(kernel.src.signature.values()): kernel for kernel in (one.result() for one in compiled)}
        stubs = [pool.submit(_launcher, kernel) for kernel in signatures.values()]
    for stub in stubs:
        stub.result()


def compile_utilities() -> None:
    """The library of C functions that Triton builds for itself on its first use."""
    nvidia.CudaUtils()


def _launcher(kernel: Any) -> None:
    """Up to Triton 3.6 each signature has a launcher in C, which is compiled as well."""
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def leave_out_compiler() -> None:
    """For the rest of this process torch's compiler is a package without contents, but for its settings.

    It takes 2 s to import, for which torch's tensors without contents have no use but a mark and some settings.
    """
    name = "torch._dynamo"
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    compiler = importlib.util.module_from_spec(spec)
    vars(compiler)["disable"] = lambda function, *_, **__: function
    sys.modules[name] = vars(torch)["_dynamo"] = compiler


def _pretend(major: int, minor: int, launch: Launch) -> None:
    """What torch says of the absent device, as `launch_for` reads it."""
    properties = SimpleNamespace(
        multi_processor_count=launch.processors,
        major=major,
        minor=minor,
        shared_memory_per_multiprocessor=launch.shared_memory + 1024,
    )
    vars(torch.cuda)["get_device_properties"] = lambda device=None: properties
