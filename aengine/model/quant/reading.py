"""What a rank reads of a quantised matrix: its part of every tensor, or all of each, and then its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import ConfigError
from aengine.kernels.linear.weights import Int4Weight, QuantizedWeight
from aengine.model.groups import Cut, Entry
from aengine.model.quant.base import Along, StoredTensor
from aengine.model.quant.columns import pick_columns
from aengine.model.quant.rows import pick_rows
from aengine.model.ranks.shard import Range, Split

# Places of all other dtypes, which are those of scales, are float32.
_PACKED = {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "U8": torch.uint8}


class Reading:
    """The tensors of one matrix, and how each is cut. Matrices of the same shape and format are read the same way."""

    def __init__(
        self,
        stored: Sequence[StoredTensor],
        sizes: tuple[int, int],
        split: Split | None = None,
        ranges: Sequence[Range] = (),
        experts: Range | None = None,
    ) -> None:
        """sizes: all outputs and all inputs. split, ranges: the outputs, or the inputs, that are wanted; None: all.
        experts: of the first axis of all tensors instead. Raises `ConfigError` where inputs cannot be cut so.
        """
        self._cuts: dict[str, Cut] = {}  # by key; of others all is read
        self._rows: Sequence[Range] = ()  # to be picked of the matrix once it is there
        self._columns: Range | None = None
        if experts is not None:
            self._cuts = {one.key: Cut(0, (experts,)) for one in stored}
        elif split == "inputs" and any(one.scatters for one in stored):
            self._columns = ranges[0]
        elif split == "inputs" and (why := undivided(stored, sizes[1], ranges)):
            raise ConfigError(f"tensor_parallel_size: {why}; lower it")
        elif split is not None:
            found = [(one, one.outputs if split == "outputs" else one.inputs) for one in stored]
            total = sizes[0 if split == "outputs" else 1]
            cuts = [(one.key, along, _cut(along, total, ranges)) for one, along in found]
            if all(cut is not None for _, along, cut in cuts if along is not None):
                self._cuts = {key: cut for key, _, cut in cuts if cut is not None}
            else:
                self._rows = ranges

    def entry(self, one: StoredTensor, instead_of: tuple[str, ...] = (), optional: bool = False) -> Entry:
        """optional: whether it may be missing even where its format needs it."""
        cut = self._cuts.get(one.key)
        return Entry(one.shape, one.dtypes, one.spellings, one.optional or optional, instead_of, cut)

    def place(self, one: StoredTensor, device: torch.device, *lead: int) -> Tensor:
        dtype = next((_PACKED[name] for name in one.dtypes if name in _PACKED), torch.float32)
        return torch.empty((*lead, *self.entry(one).kept), dtype=dtype, device=device)

    def finish(self, weight: QuantizedWeight) -> QuantizedWeight:
        """What is wanted of the matrix that the tensors make."""
        if self._columns is not None and isinstance(weight, Int4Weight):
            return pick_columns(weight, self._columns)
        return pick_rows(weight, self._rows) if self._rows else weight


def undivided(stored: Sequence[StoredTensor], inputs: int, ranges: Sequence[Range]) -> str:
    """Why tensors cannot be cut between these inputs; empty: they can be."""
    for one in stored:
        if one.scatters:
            return f"{one.name} orders columns (desc_act)"
        if one.inputs is not None and _cut(one.inputs, inputs, ranges) is None:
            width = ranges[0][1] - ranges[0][0]
            return f"{one.name} is of {one.inputs.each} columns each, and a rank's {width} are no multiple"
    return ""


def row_multiple(stored: Sequence[StoredTensor]) -> int:
    """Of how many rows a rank's should be a multiple, so that it can read them alone."""
    return math.lcm(*(one.outputs.each for one in stored if one.outputs is not None))


def _cut(along: Along | None, total: int, ranges: Sequence[Range]) -> Cut | None:
    """None where there is nothing to cut, or where a range begins or ends within an element."""
    if along is None or any(bound % along.each and bound != total for one in ranges for bound in one):
        return None
    return Cut(along.axis, tuple((-(-start // along.each), -(-stop // along.each)) for start, stop in ranges))
