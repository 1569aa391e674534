"""Compiled variants of a Triton kernel, kept by what tells them apart, so that the next launch finds one at once.

Triton's own way to a known variant takes 20 to 70 us of Python a launch. A start-up captures some 31,000 launches, and
the steps that no graph holds go as fast as they are launched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_Key = tuple[object, ...]


class KeptVariants:
    """A kernel of `triton.jit`, launched as one: `kernel[grid](*arguments, **constants_and_options)`.

    The first argument is a tensor; the others are tensors, descriptors of tensors, numbers or None. Constants go by
    name.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._variants: dict[_Key, tuple[CompiledKernel, tuple[Any, ...]]] = {}  # with the constants, in their order

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = args[0].get_device()
        key = (device, *map(_kind, args), *named, *named.values())
        known = self._variants.get(key)
        if known is None:
            kernel = self.jit[grid](*args, **named)
            if isinstance(kernel, CompiledKernel):  # else nothing was launched, or the interpreter ran it
                self._variants[key] = kernel, tuple(named[name] for name in self.jit.arg_names[len(args) :])
            return
        kernel, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        # Without metadata and hooks, which are for Triton's profiler.
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *constants)


def keep_variants(jit: Any) -> KeptVariants:
    """Decorates `triton.jit`'s result."""
    return KeptVariants(jit)


def _kind(argument: object) -> object:
    """All that Triton compiles for: the type, whether a pointer or a number is a multiple of 16, whether it is 1."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument.__class__, argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, TensorDescriptor):
        return argument.__class__, argument.base.dtype, *argument.block_shape
    return argument.__class__
