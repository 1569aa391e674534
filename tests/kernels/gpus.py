"""Compiles kernels for several GPUs. Triton's compiler needs none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
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
REGISTERS = 65536  # of a processor, on all of these GPUs; a warp takes them in pieces of 256
_REGCOUNT = 0x2F04  # the attribute of a compiled kernel with its registers of a thread


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
    "RTX 3090": Gpu(86, 82, 99),
    "RTX 4090": Gpu(89, 128, 99),
    "H200": Gpu(90, 132, 227),
    "B200": Gpu(100, 148, 227),
    "RTX 5090": Gpu(120, 170, 99),
}


# GPUs that convert 8-bit floats.
HAVE_FP8 = pytest.mark.parametrize(
    "compiler", [name for name, gpu in GPUS.items() if gpu.capability >= 89], indirect=True
)


@dataclass
class Compiler:
    """Records compiled kernels."""

    gpu: Gpu
    shared: list[int] = field(default_factory=list)  # bytes of shared memory of each kernel
    registers: list[int] = field(default_factory=list)  # of all threads of a program of each kernel
    names: list[str] = field(default_factory=list)


@pytest.fixture(params=GPUS)
def every_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Compile every launch, for each GPU in turn. At the end, check that each kernel fits its memory and registers.

    The compiler refuses instructions that the GPU does not have. A module with tests calls this fixture `compiler`.
    """
    gpu = GPUS[request.param]
    compiler = Compiler(gpu)
    run = JITFunction.run

    def build(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiler.names.append(kernel.fn.__name__)
        compiled = run(kernel, *args, warmup=True, **options)
        compiler.shared.append(compiled.metadata.shared)
        pieces = -(-registers_of(compiled.asm["cubin"]) // 8)
        compiler.registers.append(256 * pieces * compiled.metadata.num_warps)

    take_over(monkeypatch, OfflineDriver(gpu.capability, device=1000 + gpu.capability), gpu.launch, build)
    yield compiler
    assert compiler.shared
    assert max(compiler.shared) <= gpu.shared_memory * 1024
    assert max(compiler.registers) <= REGISTERS


def registers_of(binary: bytes) -> int:
    """Return the registers of a thread, from the attributes in a compiled kernel, which is an ELF file."""
    (sections,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, sections + i * size) for i in range(count)]
    start = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if binary[start + name :].startswith(b".nv.info\0"):
            end = offset + length
            while offset < end:
                kind, taken = struct.unpack_from("<HH", binary, offset)
                if kind == _REGCOUNT:
                    return int(struct.unpack_from("<I", binary, offset + 8)[0])
                offset += 4 + (taken if kind & 0xFF == 4 else 0)
    raise ValueError("the kernel does not say how many registers it takes")


def maker(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda *shape: torch.empty(*shape, dtype=dtype, device=META)


half, single, ints, longs = map(maker, (torch.bfloat16, torch.float32, torch.int32, torch.int64))
eighth, octets = maker(E4M3), maker(torch.uint8)
