"""How the matrices of one checkpoint are quantised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from aengine.errors import UnsupportedModelError
from aengine.model.quant.base import LinearFormat
from aengine.model.quant.names import Names


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What config.json says of quantisation: formats, and the modules that have each."""

    source: str  # file and key, for messages
    method: str  # as `quant_method` spells it
    formats: tuple[tuple[Names, LinearFormat], ...]  # the first that names a module is the module's
    unchanged: Names  # modules that stay as they are, whatever `formats` says
    kv_scales: bool = False  # whether attention modules have a `k_scale` and a `v_scale` for an FP8 cache

    @property
    def bits(self) -> int:
        """About how many a weight takes, with its share of the scales, in the widest of the formats."""
        return max(linear.bits for _, linear in self.formats)

    def format_of(self, *modules: str) -> LinearFormat | None:
        """The format of these linears ("model.layers.0.self_attn.q_proj"), which are fused; None: not quantised.

        Routers are never quantised and must not be asked about. Raises `UnsupportedModelError` where they differ.
        """
        formats = [self._format(module) for module in modules]
        for module, other in zip(modules, formats):
            if other != formats[0]:
                raise UnsupportedModelError(
                    f"{self.source}: {modules[0]} is {_named(formats[0])}, {module} is {_named(other)}; "
                    f"what is computed as one matrix must have one format"
                )
        return formats[0]

    def means(self, module: str) -> bool:
        """Whether the module is quantised."""
        return self._format(module) is not None

    def without(self, modules: Iterable[str]) -> QuantConfig:
        """The same, where these modules stay as they are as well."""
        return replace(self, unchanged=replace(self.unchanged, exact=self.unchanged.exact.union(modules)))

    def _format(self, module: str) -> LinearFormat | None:
        if module in self.unchanged:
            return None
        return next((linear for names, linear in self.formats if module in names), None)


def _named(linear: LinearFormat | None) -> str:
    return "not quantised" if linear is None else linear.name
