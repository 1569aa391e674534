"""The memory for adapters on one rank: factors for every linear that adapters may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.base import Kernels
from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear
from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters
from aengine.model.dense import StoredMatrix
from aengine.model.lora.room import LoraRoom, kind_of
from aengine.model.ranks.shard import ExpertsShare
from aengine.model.spec.feed_forward import ExpertsSpec


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """An adapter's factors for one linear or several fused ones, in the model's dtype."""

    a: Tensor  # [parts, rank, inputs]; zero beyond a part's own rank
    b: Tensor  # [outputs, rank], times the adapter's scale


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """All factors of one adapter, in host memory, for the whole model."""

    rank: int  # the largest of its modules
    linears: Mapping[str, Factors]  # by the names of the linears that it changes

    @property
    def bytes(self) -> int:
        return sum(factors.a.nbytes + factors.b.nbytes for factors in self.linears.values())


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A linear of the model, or several fused ones, that adapters may change."""

    parts: Mapping[str, StoredMatrix]  # in order, by their names in checkpoints
    weights: AdapterWeights | None  # None: it has no memory for adapters, or not on this rank


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """A layer's experts, which files may hold in one tensor."""

    hidden: int
    spec: ExpertsSpec


@dataclass(frozen=True, slots=True, eq=False)
class FactorCopy:
    """A copy of factors to the device. If `into` is larger than `values`, its other elements become zero."""

    into: Tensor  # [rows, columns], contiguous
    values: Tensor  # in host memory, with at most as many rows and columns


class AdapterMemory:
    """Memory for `room.places` adapters. It holds zeros until adapters are copied there."""

    def __init__(
        self,
        room: LoraRoom,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        """ignored_prefixes: prefixes of the names of modules that belong to unused parts of the model."""
        self.room = room
        self.ignored_prefixes = ignored_prefixes
        self.tokens = TokenAdapters()
        self.sites: dict[str, Site] = {}  # by the name of the first part; includes experts of other ranks
        self.layers_of_experts: dict[str, ExpertsLayer] = {}  # by the checkpoint's name for all of them
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def site(self, parts: Mapping[str, StoredMatrix], inputs: int, outputs: int) -> AdapterWeights | None:
        """Allocate memory for the adapters of a linear. Returns None if adapters may not change it.

        inputs, outputs: the sizes of the linear on this rank. It may have more outputs than its parts.
        """
        name, *_ = parts
        weights = None
        if kind_of(name) in self.room.kinds:
            places, rank = self.room.places + 1, self.room.kept_rank
            widths = [part.kept[0] for part in parts.values()]
            widths[-1] += outputs - sum(widths)
            weights = AdapterWeights(
                self._zeros(places, len(parts) * rank, inputs), self._zeros(places, outputs, rank), tuple(widths)
            )
        self.sites[name] = Site(parts, weights)
        return weights

    def experts(self, name: str, hidden: int, spec: ExpertsSpec, share: ExpertsShare) -> ExpertAdapters | None:
        """Allocate memory for the adapters of a layer's experts. Returns None if adapters may not change them.

        name: the checkpoint's name for all of them.
        """
        self.layers_of_experts[name] = ExpertsLayer(hidden, spec)
        made = ExpertAdapters([], [])
        for expert in range(spec.count):
            before, down = [f"{name}.{expert}.{part}" for part in spec.before_down], f"{name}.{expert}.{spec.down}"
            rows = StoredMatrix(spec.inner, hidden, rows=None if share.columns is None else (share.columns,))
            columns = StoredMatrix(hidden, spec.inner, columns=share.columns)
            if not share.experts[0] <= expert < share.experts[1]:  # another rank has it
                self.sites[before[0]] = Site(dict.fromkeys(before, rows), None)
                self.sites[down] = Site({down: columns}, None)
                continue
            first = self.site(dict.fromkeys(before, rows), hidden, len(before) * rows.kept[0])
            second = self.site({down: columns}, columns.kept[1], hidden)
            if first is None or second is None:
                continue
            made.gate_up.append(first)
            made.down.append(second)
        return made if made.down else None

    def has(self, name: str) -> bool:
        """Return whether adapters may change the linear whose first part has this name."""
        site = self.sites.get(name)
        return site is not None and site.weights is not None

    def adapted(self, linear: Linear, weights: AdapterWeights) -> Linear:
        return self._kernels.adapted(linear, weights, self.tokens)

    def adapted_experts(self, experts: Experts, weights: ExpertAdapters) -> Experts:
        return self._kernels.adapted_experts(experts, weights, self.tokens)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def copies(self, adapter: Adapter, place: int) -> Iterator[FactorCopy]:
        """Yield the copies that replace the contents of a place by an adapter."""
        for name, site in self.sites.items():
            if site.weights is not None:
                yield from _copies(site, site.weights, adapter.linears.get(name), place)


def _copies(site: Site, weights: AdapterWeights, factors: Factors | None, place: int) -> Iterator[FactorCopy]:
    first, second = weights.a[place], weights.b[place]
    if factors is None:
        nothing = first.new_empty((0, 0), device="cpu")
        yield from (FactorCopy(first, nothing), FactorCopy(second, nothing))
        return
    row = at = 0  # offsets in the whole matrix, and in this rank's part of it
    for index, part in enumerate(site.parts.values()):
        columns, rows = part.columns or (0, part.inputs), part.rows or ((0, part.outputs),)
        own = first[index * weights.rank : (index + 1) * weights.rank]
        yield FactorCopy(own, factors.a[index][:, slice(*columns)])
        width = weights.outputs[index]
        put = at
        for start, stop in rows:
            yield FactorCopy(second[put : min(put + stop - start, at + width)], factors.b[row + start : row + stop])
            put += stop - start
        row, at = row + part.outputs, at + width
