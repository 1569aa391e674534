"""Compiled variants are cached by everything that Triton specialises on, and launched without Triton's own dispatch."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # comes with the runner's kernels

import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from aengine import kernels
from aengine.kernels.offline import OfflineDriver
from aengine.kernels.variants import KeptVariants, _kind


class Compiled(CompiledKernel):  # type: ignore[misc]
    """A variant that records its launches."""

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.function, self.packed_metadata = "function", "packed"
        self._launches = launches

    def __del__(self) -> None:
        pass  # no module to unload

    @property
    def run(self) -> Callable[..., None]:
        return lambda *args: self._launches.append(args)


class Jit:
    """Like the result of `triton.jit` for `def kernel(x, n, WIDE, BLOCK)`."""

    arg_names = ("x", "n", "WIDE", "BLOCK")

    def __init__(self, compiles: bool = True) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self._compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(*args: Any, **named: Any) -> Compiled | None:
            self.asked.append((grid, args, named))
            return Compiled(self.launches) if self._compiles else None

        return launch


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: ("stream of", device)))


def test_a_launch_like_an_earlier_one_skips_tritons_dispatch() -> None:
    jit = Jit()
    kernel = KeptVariants(jit)
    first, second = torch.zeros(8), torch.ones(8)
    kernel[(3,)](first, 5, BLOCK=64, WIDE=False, num_warps=4)
    assert len(jit.asked) == 1
    assert jit.launches == []  # Triton itself launched it
    kernel[(2, 7)](second, 9, BLOCK=64, WIDE=False, num_warps=4)
    assert len(jit.asked) == 1
    ((x, y, z, stream, function, packed, metadata, enter, leave, *args),) = jit.launches
    assert (x, y, z, stream, function, packed) == (2, 7, 1, ("stream of", -1), "function", "packed")
    assert metadata is enter is leave is None
    assert args[0] is second
    assert args[1:] == [9, False, 64]  # constants in the kernel's order


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((torch.zeros(8, dtype=torch.int32), 5), {}),
        ((torch.zeros(9)[1:], 5), {}),
        ((torch.zeros(8), 1), {}),
        ((torch.zeros(8), 32), {}),
        ((torch.zeros(8), 2**31), {}),
        ((torch.zeros(8), 5.0), {}),
        ((torch.zeros(8), None), {}),
        ((torch.zeros(8), TensorDescriptor.from_tensor(torch.zeros(4, 16), [2, 16])), {}),
        ((torch.zeros(8), 5), {"WIDE": True}),
        ((torch.zeros(8), 5), {"num_warps": 8}),
    ],
)
def test_any_other_launch_is_compiled(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    jit = Jit()
    kernel = KeptVariants(jit)
    usual = {"BLOCK": 64, "WIDE": False, "num_warps": 4}
    kernel[(3,)](torch.zeros(8), 5, **usual)
    kernel[(3,)](*args, **usual | named)
    assert len(jit.asked) == 2


def test_kernels_that_were_not_launched_are_not_cached() -> None:
    """If launches only compile, and in the interpreter."""
    jit = Jit(compiles=False)
    kernel = KeptVariants(jit)
    for _ in range(2):
        kernel[(3,)](torch.zeros(8), 5, BLOCK=64, WIDE=False)
    assert len(jit.asked) == 2


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["y"])
def _some_kernel(x, y, n, m, eps, BLOCK: tl.constexpr):
    pass


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.skipif(not isinstance(_some_kernel, JITFunction), reason="the interpreter compiles nothing")
def test_arguments_of_one_kind_are_one_variant_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = OfflineDriver(90, device=2100)
    monkeypatch.setattr(driver, "_active", offline)
    *_, binder = _some_kernel.device_caches[2100]
    flat = torch.zeros(64)
    tensors = [flat, flat[1:], flat[4:], flat.half(), flat.view(torch.int32), flat.bfloat16()[1:]]
    numbers = [0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 16, 2**40]
    kinds: dict[tuple[object, ...], str] = {}
    for x, y, n, m, eps in itertools.product(tensors, tensors, numbers, numbers, [0.0, 1e-6]):
        _, specialization, _ = binder(x, y, n, m, eps, BLOCK=64)
        args = (x, y, n, m, eps)
        assert kinds.setdefault(tuple(map(_kind, args)), str(specialization)) == str(specialization), args
    assert len(set(kinds.values())) > 100


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.skipif(not isinstance(_some_kernel, JITFunction), reason="the interpreter compiles nothing")
def test_descriptors_of_one_kind_are_one_variant_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", OfflineDriver(90, device=2101))
    *_, binder = _some_kernel.device_caches[2101]
    flat = torch.zeros(256)
    tensors = [
        flat.view(16, 16),
        flat.view(4, 64),
        flat[64:].view(8, 24),
        flat.half().view(16, 16),
        flat.view(4, 4, 16),
    ]
    blocks = [[8, 16], [16, 16], [1, 64], [4, 4, 16], [1, 4, 16]]
    descriptors = [
        TensorDescriptor.from_tensor(tensor, block)
        for tensor, block in itertools.product(tensors, blocks)
        if len(block) == tensor.dim()
    ]
    kinds: dict[object, str] = {}
    for one in [*descriptors, flat, flat[4:].half(), 16, None]:
        _, specialization, _ = binder(flat, one, 1, 1, 0.0, BLOCK=64)
        assert kinds.setdefault(_kind(one), str(specialization)) == str(specialization), one
    assert len(kinds) == len(set(kinds.values())) == 12


def test_every_kernel_is_cached() -> None:
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, "aengine.kernels.")]
    found = {
        f"{name}.{attribute}": value
        for name in names
        for attribute, value in vars(importlib.import_module(name)).items()
        if attribute.endswith("_kernel")
    }
    assert len(found) > 30
    assert [name for name, kernel in found.items() if not isinstance(kernel, KeptVariants)] == []
