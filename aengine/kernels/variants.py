"""Caches the compiled variants of Triton kernels, so that launches find them fast.

Triton itself takes 20 to 70 us of Python for each launch of a known variant. A start-up captures about 31,000 launches,
and steps outside of graphs are limited by the time of their launches.
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
    """A Triton kernel with its compiled variants, launched by `kernel[grid](*arguments, **constants_and_options)`.

    The first argument is a tensor. The others are tensors, tensor descriptors, numbers or None. Constants are passed by
    name.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        # The values are the kernel and its constants in order.
        self._variants: dict[_Key, tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = args[0].get_device()
        key = (device, *map(_kind, args), *named, *named.values())
        known = self._variants.get(key)
        if known is None:
            kernel = self.jit[grid](*args, **named)
            if isinstance(kernel, CompiledKernel):  # it is none if nothing was launched or the interpreter ran
                self._variants[key] = kernel, tuple(named[name] for name in self.jit.arg_names[len(args) :])
            return
        kernel, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        # Metadata and hooks are only for Triton's profiler.
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *args, *constants)


def keep_variants(jit: Any) -> KeptVariants:
    """Decorate the result of `triton.jit`, so that launches find compiled variants fast."""
    return KeptVariants(jit)


def _kind(argument: object) -> object:
    """Return all properties that Triton specialises on: the type, and whether a number is 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument.__class__, argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, TensorDescriptor):
        return argument.__class__, argument.base.dtype, *argument.block_shape
    return argument.__class__
