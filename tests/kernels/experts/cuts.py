"""Experts whose products have the config that a test gives."""

from __future__ import annotations

from typing import Any

from aengine.kernels.experts.packed.single_rows import PackedSingleConfig
from aengine.kernels.experts.single_rows import SingleConfig
from aengine.kernels.experts.triton_experts import TritonExperts


class CutProducts:
    """`ExpertProducts` with one config for any number of tokens."""

    def __init__(self, products: Any, config: object) -> None:
        self._products = products
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._products, name)

    def single_config(self, *_: object) -> object:
        return self._config if isinstance(self._config, (SingleConfig, PackedSingleConfig)) else None

    def tile_config(self, *_: object) -> Any:
        return self._config


def with_cut(experts: TritonExperts, config: object) -> TritonExperts:
    return TritonExperts(CutProducts(experts.products, config))
