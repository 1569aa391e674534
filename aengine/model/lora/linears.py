"""Lists the linears that adapters can change, and finds the linears that a pair of factors in a file changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from aengine.errors import AdapterError
from aengine.model.dense import StoredMatrix
from aengine.model.families.wrappers import language_model_name
from aengine.model.lora.files import Pair
from aengine.model.lora.fused_experts import FusedExperts, unfuse
from aengine.model.lora.memory import AdapterMemory, Site
from aengine.model.lora.room import kind_of

# Names of routers in checkpoints and in PEFT's files.
_ROUTERS = (".mlp.gate", ".mlp.router", ".mlp.router.gate", ".block_sparse_moe.gate", ".router.proj")


@dataclass(frozen=True, slots=True)
class Change:
    """A linear that an adapter changes."""

    name: str  # of the linear in the model
    module: str  # its name in the adapter's file; patterns of the adapter's settings match this name
    rank: int
    # Extracts the factors of this linear from the file's factors.
    unpack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # -> [rank, inputs], [outputs, rank]


def _unchanged(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


class Linears:
    """The linears of a model, by their names in checkpoints."""

    def __init__(self, memory: AdapterMemory) -> None:
        self.sites = memory.sites
        self._ignored_prefixes = memory.ignored_prefixes
        self._site_of = {name: site for site in self.sites for name in self.sites[site].parts}
        self._shared = {  # names of shared experts in transformers, and in checkpoints
            f"{name.removesuffix('experts')}shared_experts.": f"{name.removesuffix('experts')}{layer.spec.shared_name}."
            for name, layer in memory.layers_of_experts.items()
        }
        self._fused = {
            name: FusedExperts(name, layer.hidden, layer.spec) for name, layer in memory.layers_of_experts.items()
        }

    def names(self) -> Iterator[str]:
        """Yield the names of all linears. A fused linear has several."""
        yield from self._site_of

    def site(self, name: str) -> tuple[str, Site, int]:
        """Return the name of the site that a linear is a part of, the site, and the number of the part."""
        site = self._site_of[name]
        return site, self.sites[site], list(self.sites[site].parts).index(name)

    def stored(self, name: str) -> StoredMatrix:
        return self.sites[self._site_of[name]].parts[name]

    def changes(self, pair: Pair, peft: tuple[int, ...] | None) -> list[Change]:
        """Return the linears that the factors change: one linear, or one for each expert.

        The list is empty if the factors belong to an unused part of the model, such as a vision tower.

        peft: the PEFT version that wrote the factors, if known.

        Raises `AdapterError` if there is no such linear, or if its shape differs.
        """
        module = language_model_name(pair.module)
        if self._ignored_prefixes and module.startswith(self._ignored_prefixes):
            return []
        for name in map(self._in_checkpoint, (module, f"model.{module}")):
            if self._fused and name.endswith(_ROUTERS):
                raise AdapterError(
                    f"{pair.a.path}: {pair.a.name} changes {pair.module}, the router of a layer's experts, for which "
                    f"adapters are not supported; merge it into the base model (PEFT's merge_and_unload) and serve that"
                )
            if name in self._site_of:
                return [self._whole(pair, name)]
            if (fused := self._experts(name)) is not None:
                matrix, rank = fused.matrix(pair, peft)
                return [
                    Change(expert, f"{pair.module.removesuffix('.base_layer')}.{matrix.parameter}", rank, unpack)
                    for expert, unpack in unfuse(fused, matrix, rank)
                ]
        kinds = sorted({kind_of(name).rpartition(".")[-1] for name in self._site_of})
        raise AdapterError(
            f"{pair.a.path}: {pair.a.name} changes {pair.module}, which is no linear that adapters can change in this "
            f"model ({', '.join(kinds)})"
        )

    def _in_checkpoint(self, module: str) -> str:
        """Return the checkpoint's name for a module of transformers. They differ for some shared experts."""
        block, shared, part = module.partition("shared_experts.")
        return self._shared.get(block + shared, block + shared) + part

    def _whole(self, pair: Pair, name: str) -> Change:
        stored, rank = self.stored(name), pair.a.shape[0]
        for factor, shape in ((pair.a, (rank, stored.inputs)), (pair.b, (stored.outputs, rank))):
            if factor.shape != shape:
                raise AdapterError(
                    f"{factor.path}: {factor.name} has shape {list(factor.shape)}, for this model it is {list(shape)}; "
                    f"the adapter belongs to another base model"
                )
        return Change(name, pair.module, rank, _unchanged)

    def _experts(self, module: str) -> FusedExperts | None:
        """Return the layer's experts if the module is all of them. transformers always names their block "mlp"."""
        module = module.removesuffix(".base_layer")
        found = self._fused.get(module)
        if found is None and module.endswith(".mlp.experts"):
            layer = module.removesuffix("mlp.experts")
            found = next((one for name, one in self._fused.items() if name.startswith(layer)), None)
        return found
