"""Triton without a GPU: launches only compile kernels into Triton's cache on disk."""

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
    """Replaces Triton's driver. device: must differ from other drivers', because kernels cache variants by device."""

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
    """Selects the kernel variants that this process compiles: every `count`-th launched variant, from `index` on.

    So several processes with the same launches divide the work without communication.
    """

    def __init__(self, index: int, count: int) -> None:
        self._index = index
        self._count = count
        self._seen: set[tuple[int, str]] = set()

    def selects(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Return whether this process compiles the variant and has not launched it before."""
        binder = kernel.device_caches[driver.active.get_current_device()][-1]
        _, specialization, chosen = binder(*args, **options)
        variant = (id(kernel), f"{specialization} {chosen}")
        if variant in self._seen:
            return False
        self._seen.add(variant)
        return len(self._seen) % self._count == self._index % self._count


@contextmanager
def compiling(capability: tuple[int, int], launch: Launch, share: Share, threads: int) -> Iterator[None]:
    """Make launches of Triton kernels only compile, with tensors on the meta device. Cannot be undone in this process.

    Threads compile while the context is open. When it closes, all kernels are compiled. Triton releases the GIL for
    nine tenths of the work.
    """
    major, minor = capability
    driver.set_active(OfflineDriver(10 * major + minor, device=0))
    _pretend(major, minor, launch)
    leave_out_compiler()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if share.selects(kernel, args, options):
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
    """Build Triton's library of C functions, which it otherwise builds on first use."""
    nvidia.CudaUtils()


def _launcher(kernel: Any) -> None:
    """Compile the C launcher of a signature, which Triton needs up to version 3.6."""
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def leave_out_compiler() -> None:
    """Replace torch's compiler by an almost empty package, for the rest of this process.

    Its import takes 2 s, and meta tensors use only a decorator and some settings of it.
    """
    name = "torch._dynamo"
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    compiler = importlib.util.module_from_spec(spec)
    vars(compiler)["disable"] = lambda function, *_, **__: function
    sys.modules[name] = vars(torch)["_dynamo"] = compiler


def _pretend(major: int, minor: int, launch: Launch) -> None:
    """Let torch report the properties of the absent device that `launch_for` reads."""
    properties = SimpleNamespace(
        multi_processor_count=launch.processors,
        major=major,
        minor=minor,
        shared_memory_per_multiprocessor=launch.shared_memory + 1024,
    )
    vars(torch.cuda)["get_device_properties"] = lambda device=None: properties
