"""A CUDA graph on the CPU: records torch's operations, and runs them again with the tensors of the recording.

As on a GPU, a replay runs no Python of the captured region, and results are in the memory of the recording. Reading a
value on the host is an error during a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.ngram import cpu_ngram

T = TypeVar("T")
_recording: list[CpuGraph] = []  # the graph that is being recorded
_numpy = torch.Tensor.numpy


def _refuse(*_: object, **__: object) -> Any:
    raise RuntimeError("the host reads a value during a recording")


class CpuGraph(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        _recording.append(self)
        torch.Tensor.numpy = _refuse  # type: ignore[method-assign]
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        torch.Tensor.numpy = _numpy  # type: ignore[method-assign]
        _recording.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            _refuse()
        return self.call(func, *args, **(kwargs or {}))

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a function and record it as one operation."""
        out = function(*args, **options)
        known = {_memory(tensor) for tensor in _tensors((args, options))}
        # The results that a replay has to copy. Others are views of arguments.
        own = [tensor if _memory(tensor) not in known else None for tensor in _tensors(out)]
        self._calls.append((function, args, options, own))
        return out

    def replay(self) -> None:
        with torch.inference_mode(), _disable_current_modes():
            for function, args, options, own in self._calls:
                for kept, new in zip(own, _tensors(function(*args, **options)), strict=True):
                    if kept is not None:
                        kept.copy_(new)


def _tensors(value: object) -> list[Tensor]:
    """Return all tensors in containers and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def recordable(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that a recording holds as one operation, so that it may read values."""

    def call(*args: Any, **options: Any) -> T:
        if not _recording:
            return function(*args, **options)
        with _disable_current_modes(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "numpy", _numpy)
            return _recording[-1].call(function, *args, **options)

    return call


class RecordableNgram:
    """`cpu_ngram`, as a recording needs it."""

    match = staticmethod(recordable(cpu_ngram.match))
    append = staticmethod(recordable(cpu_ngram.append))


class RecordableAttention(TorchAttention):
    """torch's attention, as a recording needs it: every replay plans by the lengths that it finds."""

    def bind(self, layer: AttentionLayer) -> Attend:
        attend = super().bind(layer)

        def planned(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, batch: AttentionBatch) -> Tensor:
            return attend(q, k, v, replace(batch, page_table=table, seq_lens=lens, plans={}))

        one = recordable(planned)
        return lambda q, k, v, batch: one(q, k, v, batch.page_table, batch.seq_lens, batch)
