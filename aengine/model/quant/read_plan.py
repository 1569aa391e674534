"""Which part of a quantised matrix a rank reads: its part of every tensor, or whole tensors and then its rows."""

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
    """How each tensor of a matrix is cut. Matrices of the same shape and format have equal plans."""

    def __init__(
        self,
        stored: Sequence[StoredTensor],
        sizes: tuple[int, int],
        split: Split | None = None,
        ranges: Sequence[Range] = (),
        experts: Range | None = None,
    ) -> None:
        """sizes: all outputs and all inputs.
        split, ranges: the outputs, or the inputs, that the rank needs. None: all.
        experts: the experts that the rank needs of fused ones, instead of outputs or inputs.

        Raises `ConfigError` if inputs cannot be cut at these ranges.
        """
        self._cuts: dict[str, Cut] = {}  # by key; tensors without one are read whole
        self._rows: Sequence[Range] = ()  # to be picked from the whole matrix
        self._columns: Range | None = None
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
            if all(cut is not None for _, axis, cut in cuts if axis is not None):
                self._cuts = {key: cut for key, _, cut in cuts if cut is not None}
            else:
                self._rows = ranges

    def entry(self, one: StoredTensor, replaces: tuple[str, ...] = (), optional: bool = False) -> Entry:
        """optional: whether it may be missing even if its format needs it."""
        return Entry(
            one.shape, one.dtypes, one.other_shapes, one.optional or optional, replaces, self._cuts.get(one.key),
            one.random_value,
        )  # fmt: skip

    def allocate(self, one: StoredTensor, device: torch.device, *lead: int) -> Tensor:
        """Memory for what is read of the tensor, with leading axes. Scales are read into float32."""
        dtype = next((DTYPES[name] for name in one.dtypes if name not in SCALES), torch.float32)
        return torch.empty((*lead, *self.entry(one).kept), dtype=dtype, device=device)

    def pick(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return what the rank needs of the matrix that the tensors make."""
        if self._columns is not None:
            return weight.columns(*self._columns)
        return weight.rows(self._rows) if self._rows else weight


def why_indivisible(stored: Sequence[StoredTensor], inputs: int, ranges: Sequence[Range]) -> str:
    """Say why tensors cannot be cut between these inputs. Empty: they can be."""
    for one in stored:
        if one.scatters_columns:
            return f"{one.name} orders columns (desc_act)"
        if one.inputs is not None and _cut(one.inputs, inputs, ranges) is None:
            width = ranges[0][1] - ranges[0][0]
            return f"{one.name} is of {one.inputs.per_element} columns each, and a rank's {width} are no multiple"
    return ""


def row_multiple(stored: Sequence[StoredTensor]) -> int:
    """Return the number of rows whose multiples a rank can read alone."""
    return math.lcm(*(one.outputs.per_element for one in stored if one.outputs is not None))


def _cut(axis: TensorAxis | None, total: int, ranges: Sequence[Range]) -> Cut | None:
    """None: there is nothing to cut, or a range begins or ends within an element."""
    if axis is None or any(bound % axis.per_element and bound != total for one in ranges for bound in one):
        return None
    each = axis.per_element
    return Cut(axis.axis, tuple((-(-start // each), -(-stop // each)) for start, stop in ranges))
