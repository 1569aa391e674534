"""cuBLASLt called without torch: FP8 in blocks of 128, the residual added in the product, and no workspace.

torch's `scaled_mm` adds a residual in a second launch. It also gives the library a workspace, in which the library
counts tiles; then a launch before each product sets that counter to zero.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

# These constants are from the library's header.
_E4M3, _F32 = 28, 0  # CUDA_R_8F_E4M3, CUDA_R_32F
_OUTPUTS = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_COMPUTE_F32 = 68  # CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _EPILOGUE, _BIAS, _BIAS_TYPE = 3, 7, 8, 26  # CUBLASLT_MATMUL_DESC_...
_SCALE_A, _SCALE_B, _MODE_A, _MODE_B = 17, 18, 31, 32
_GROUPS_OF_128, _BLOCKS_OF_128 = 4, 5  # CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, ..._BLK128x128_32F
_ADD_BIAS = 4  # CUBLASLT_EPILOGUE_BIAS
_COLUMNS = 3  # CUBLASLT_MATRIX_LAYOUT_COLS
_MOST_WORKSPACE, _LEAST_ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_..., of A, B, C and D
_CLUSTER = 8  # CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
_SHARE_X, _SHARE_WEIGHT = 3, 5  # CUBLASLT_CLUSTER_SHAPE_2x1x1, ..._1x2x1
_ALIGNMENT = 16  # bytes: every row of an operand begins at a multiple


class _Found(ctypes.Structure):  # cublasLtMatmulHeuristicResult_t
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Library:
    """The library that torch has loaded, with a handle for the current device. Raises: OSError if it is missing."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        self._calls: Any = ctypes.CDLL(f"libcublasLt.so.{major}")
        self.handle = self.make("cublasLt")
        self.preference = self.make("cublasLtMatmulPreference")
        preferences = {_MOST_WORKSPACE: c_size_t(0)} | {of: c_uint32(_ALIGNMENT) for of in _LEAST_ALIGNMENTS}
        for attribute, value in preferences.items():
            self.put("cublasLtMatmulPreference", self.preference, attribute, value)

    def make(self, kind: str, *arguments: object) -> c_void_p:
        made = c_void_p()
        self.call(f"{kind}Create", byref(made), *arguments)
        return made

    def drop(self, kind: str, made: c_void_p) -> None:
        self.call(f"{kind}Destroy", made)

    def put(self, kind: str, made: c_void_p, attribute: int, value: Any) -> None:
        self.call(f"{kind}SetAttribute", made, c_int(attribute), byref(value), c_size_t(sizeof(value)))

    def call(self, name: str, *arguments: object) -> None:
        code = self.status(name, *arguments)
        if code:
            raise RuntimeError(f"{name} failed with cuBLAS's error {code}")

    def status(self, name: str, *arguments: object) -> int:
        code: int = getattr(self._calls, name)(*arguments)
        return code


@lru_cache
def _library(device: torch.device) -> _Library | None:
    """Return the library for a device; None if it is missing or too old for these scales."""
    try:
        with torch.cuda.device(device):
            library = _Library()
        library.drop("cublasLtMatmulDesc", _description(library, torch.bfloat16, bias=False))
    except (OSError, AttributeError, RuntimeError):
        return None
    return library


def _description(library: _Library, dtype: torch.dtype, *, bias: bool) -> c_void_p:
    # The library's matrices are stored by columns: its A is the transposed weight, and its B is x.
    made = library.make("cublasLtMatmulDesc", c_int(_COMPUTE_F32), c_int(_F32))
    values = {_TRANSPOSE_A: 1, _MODE_A: _BLOCKS_OF_128, _MODE_B: _GROUPS_OF_128}
    if bias:
        values |= {_EPILOGUE: _ADD_BIAS, _BIAS_TYPE: _OUTPUTS[dtype]}
    for attribute, value in values.items():
        library.put("cublasLtMatmulDesc", made, attribute, c_int32(value))
    return made


class BlockProducts:
    """A product for each shape of weights. All linears of a model share it, from one thread."""

    def __init__(self) -> None:
        self._products: dict[tuple[torch.device, torch.Size, int, torch.dtype, bool], BlockProduct] = {}
        self._sides: dict[torch.device, list[Side]] = {}

    @staticmethod
    def takes(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the library is available and knows the scales for outputs of `dtype`: it does not for 32 bits.

        A meta device stands for a GPU on which it is available.
        """
        if dtype not in _OUTPUTS or device.type not in ("cuda", "meta"):
            return False
        return device.type == "meta" or _library(device) is not None

    def __call__(self, weight: Tensor, dtype: torch.dtype, *, bias: bool) -> BlockProduct | None:
        """Return the product of weights like this [n, k], with outputs of `dtype`; None if the library does not take
        them.

        weight: it may be some columns of a wider one.
        """
        library = _library(weight.device) if weight.is_cuda and self.takes(weight.device, dtype) else None
        if library is None:
            return None
        key = weight.device, weight.shape, weight.stride(0), dtype, bias
        if key not in self._products:
            n, k = weight.shape
            self._products[key] = BlockProduct(library, n, k, weight.stride(0), dtype, bias=bias)
        return self._products[key]

    def sides(self, device: torch.device, count: int) -> list[Side]:
        """Return streams for products that run at the same time as that on the current stream."""
        sides = self._sides.setdefault(device, [])
        while len(sides) < count:
            sides.append(Side(torch.cuda.Stream(device), torch.cuda.Event(), torch.cuda.Event()))
        return sides[:count]


@dataclass(frozen=True, slots=True)
class Side:
    """A stream for work next to the current stream's, with events for its beginning and its end."""

    stream: torch.cuda.Stream
    begins: torch.cuda.Event
    ends: torch.cuda.Event


class BlockProduct:
    """Products with weights [n, k], for one number of rows at a time."""

    def __init__(self, library: _Library, n: int, k: int, width: int, dtype: torch.dtype, *, bias: bool) -> None:
        """width: elements from one row of x or of the weight to the next. If it is more than k, other products run
        too.
        """
        self._library = library
        self._beside = width > k
        self._description = _description(library, dtype, bias=bias)
        finalize(self, library.drop, "cublasLtMatmulDesc", self._description)
        self._weight, self._x, self._out = (
            library.make("cublasLtMatrixLayout", c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(apart))
            for kind, rows, columns, apart in ((_E4M3, k, n, width), (_E4M3, k, 1, width), (_OUTPUTS[dtype], n, 1, n))
        )
        for layout in (self._weight, self._x, self._out):
            finalize(self, library.drop, "cublasLtMatrixLayout", layout)
        self._found = _Found()
        self._rows = 0
        self._known = False

    def __call__(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None = None,
        *, add: bool = False, stream: torch.cuda.Stream | None = None,
    ) -> bool:  # fmt: skip
        """Compute out [m, n] = x weight^T + bias, plus out if `add`. Return False if there is no algorithm for m.

        Then nothing is done; that is so if m is no multiple of four. x is [m, k] e4m3 with scales [k / 128, m]. weight
        is [n, k] with scales [n / 128, k / 128 up to a multiple of four]. out and bias [n] are of this product's dtype.
        Scales and out are contiguous, and rows begin at multiples of 16 bytes. stream: None means the current one.
        """
        tensors = {_SCALE_A: scale, _SCALE_B: x_scale} | ({} if bias is None else {_BIAS: bias})
        for attribute, tensor in tensors.items():
            self._library.put("cublasLtMatmulDesc", self._description, attribute, c_void_p(tensor.data_ptr()))
        if not self._takes(len(out)):
            return False
        stream = torch.cuda.current_stream(x.device) if stream is None else stream
        at = c_void_p(out.data_ptr())
        self._library.call(
            "cublasLtMatmul", self._library.handle, self._description, byref(c_float(1)),
            c_void_p(weight.data_ptr()), self._weight, c_void_p(x.data_ptr()), self._x, byref(c_float(add)),
            at, self._out, at, self._out, byref(self._found), c_void_p(), c_size_t(0), c_void_p(stream.cuda_stream),
        )  # fmt: skip
        return True

    def _takes(self, rows: int) -> bool:
        """Choose an algorithm if the number of rows has changed. The scales must be set before."""
        if rows != self._rows:
            for layout in (self._x, self._out):
                self._library.put("cublasLtMatrixLayout", layout, _COLUMNS, c_uint64(rows))
            count = c_int()
            code = self._library.status(
                "cublasLtMatmulAlgoGetHeuristic", self._library.handle, self._description, self._weight, self._x,
                self._out, self._out, self._library.preference, c_int(1), byref(self._found), byref(count),
            )  # fmt: skip
            self._rows, self._known = rows, code == 0 and count.value > 0
            if self._known and self._beside:
                self._leave_room(rows)
        return self._known

    def _leave_room(self, rows: int) -> None:
        """Use clusters of two processors. With the library's clusters of eight, a second product would wait for the
        first.

        The two share an operand: the weight if there is a second tile of rows, else x.
        """
        shape = c_uint16(_SHARE_WEIGHT if rows > 128 else _SHARE_X)
        algorithm, checked = byref(self._found.algorithm), _Found()
        refused = self._library.status(
            "cublasLtMatmulAlgoConfigSetAttribute", algorithm, c_int(_CLUSTER), byref(shape), c_size_t(sizeof(shape))
        ) or self._library.status(
            "cublasLtMatmulAlgoCheck", self._library.handle, self._description, self._weight, self._x, self._out,
            self._out, algorithm, byref(checked),
        )  # fmt: skip
        self._known = not refused and checked.workspace == 0
