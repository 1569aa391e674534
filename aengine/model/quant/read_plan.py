"""Plans what a rank reads of a quantised matrix: a part of every tensor, or all tensors, of which it keeps a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import ConfigError
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.model.groups import DTYPES, Cut, Entry
from aengine.model.quant.base import SCALES, StoredTensor, TensorAxis
from aengine.model.ranks.shard import Range, Split


class ReadPlan:
    """The part of each tensor of a matrix that a rank reads. Matrices of the same shape and format have equal plans."""

    def __init__(
        self,
        stored: Sequence[StoredTensor],
        sizes: tuple[int, int],
        split: Split | None = None,
        ranges: Sequence[Range] = (),
        experts: Range | None = None,
    ) -> None:
        """Args:
        sizes: The outputs and inputs of the whole matrix.
        split, ranges: The ranges of outputs or inputs that the rank needs. split None: it needs all.
        experts: The experts that the rank needs, if it needs whole experts of a fused tensor.

        Raises `ConfigError` if inputs cannot be cut at these ranges.
        """
        self._cuts: dict[str, Cut] = {}  # by key; a tensor without a cut is read completely
        self._rows: Sequence[Range] = ()  # rows to keep of the unpacked matrix
        self._columns: Range | None = None  # columns to keep of the unpacked matrix
        if experts is not None:
            self._cuts = {one.key: Cut(0, (experts,)) for one in stored}
        elif split == "inputs" and any(one.scatters_columns for one in stored):
            self._columns = ranges[0]
        elif split == "inputs" and (why := why_indivisible(stored, sizes[1], ranges)):
            raise ConfigError(f"tensor_parallel_size: {why}; lower it")
        elif split is not None:
            axes = [(one, one.outputs if split == "outputs" else one.inputs) for one in stored]
            total = sizes[0 if split == "outputs" else 1]
            cuts = [(one.key, axis, _cut(axis, total, ranges)) for one, axis in axes]
            divisible = any(axis is not None for _, axis in axes)
            if divisible and all(cut is not None for _, axis, cut in cuts if axis is not None):
                self._cuts = {key: cut for key, _, cut in cuts if cut is not None}
            else:
                self._rows = ranges

    def entry(self, one: StoredTensor, replaces: tuple[str, ...] = (), optional: bool = False) -> Entry:
        """Return the entry of a tensor. optional: whether it may be missing even if its format requires it."""
        return Entry(
            one.shape, one.dtypes, one.other_shapes, one.optional or optional, replaces, self._cuts.get(one.key),
            one.random_value, one.at_most,
        )  # fmt: skip

    def allocate(self, one: StoredTensor, device: torch.device, *lead: int) -> Tensor:
        """Return memory for the part of a tensor that is read, with leading axes `lead`. Scales become float32."""
        dtype = next((DTYPES[name] for name in one.dtypes if name not in SCALES), torch.float32)
        shape = *lead, *self.entry(one).kept
        return (torch.zeros if one.at_most else torch.empty)(shape, dtype=dtype, device=device)

    def pick(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the part of an unpacked matrix that the rank needs."""
        if self._columns is not None:
            return weight.columns(*self._columns)
        return weight.rows(self._rows) if self._rows else weight


def why_indivisible(stored: Sequence[StoredTensor], inputs: int, ranges: Sequence[Range]) -> str:
    """Return why tensors cannot be cut at these ranges of inputs. Empty: they can be cut."""
    for one in stored:
        if one.scatters_columns:
            return f"{one.name} orders columns (desc_act)"
        if one.inputs is not None and _cut(one.inputs, inputs, ranges) is None:
            width = ranges[0][1] - ranges[0][0]
            return f"{one.name} is of {one.inputs.per_element} columns each, and a rank's {width} are no multiple"
    return ""


def row_multiple(stored: Sequence[StoredTensor]) -> int:
    """Return the granularity of rows: a rank can read any multiple of this number of rows."""
    return math.lcm(*(one.outputs.per_element for one in stored if one.outputs is not None))


def _cut(axis: TensorAxis | None, total: int, ranges: Sequence[Range]) -> Cut | None:
    """Return the cut of a tensor. None: it has no such axis, or a range begins or ends within an element."""
    if axis is None or any(bound % axis.per_element and bound != total for one in ranges for bound in one):
        return None
    each = axis.per_element
    return Cut(axis.axis, tuple((-(-start // each), -(-stop // each)) for start, stop in ranges))
