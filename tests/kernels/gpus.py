"""Compiles kernels for several GPUs. Triton's compiler needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from aengine.kernels.launch import Launch
from aengine.kernels.linear.fp8.quantize import E4M3
from aengine.kernels.offline import OfflineDriver
from tests.kernels.offline import take_over

META = torch.device("meta")  # shapes and types without memory


@dataclass(frozen=True)
class Gpu:
    capability: int
    processors: int
    shared_memory: int  # KB of a program

    @property
    def launch(self) -> Launch:
        return Launch(self.processors, self.capability >= 90, self.shared_memory * 1024, divmod(self.capability, 10))


GPUS = {
    "A100": Gpu(80, 108, 163),
    "RTX 4090": Gpu(89, 128, 99),
    "H200": Gpu(90, 132, 227),
    "RTX 5090": Gpu(120, 170, 99),
}


# GPUs that convert 8-bit floats.
HAVE_FP8 = pytest.mark.parametrize(
    "compiler", [name for name, gpu in GPUS.items() if gpu.capability >= 89], indirect=True
)


@dataclass
class Compiler:
    """Records compiled kernels. shared: bytes of shared memory of each kernel; names: of the kernels."""

    gpu: Gpu
    shared: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@contextmanager
def compiling(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Compile every launch for this GPU. At the end, check that each kernel fits its shared memory."""
    compiler = Compiler(gpu)
    run = JITFunction.run

    def build(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiler.names.append(kernel.fn.__name__)
        compiler.shared.append(run(kernel, *args, warmup=True, **options).metadata.shared)

    take_over(monkeypatch, OfflineDriver(gpu.capability, device=1000 + gpu.capability), gpu.launch, build)
    yield compiler
    assert compiler.shared
    assert max(compiler.shared) <= gpu.shared_memory * 1024


def maker(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda *shape: torch.empty(*shape, dtype=dtype, device=META)


half, single, ints, longs = map(maker, (torch.bfloat16, torch.float32, torch.int32, torch.int64))
eighth, octets = maker(E4M3), maker(torch.uint8)
