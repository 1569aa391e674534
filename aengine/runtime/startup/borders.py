"""Numbers of rows at which the kernels of products change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from aengine.kernels.launch import Launch
from aengine.kernels.linear.gated_rows import fewest_rows
from aengine.kernels.linear.int4.config import DENSE_ROWS
from aengine.kernels.linear.small_linear import dense_borders
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.triton_kernels import LINEAR_BORDERS
from aengine.model.config import DraftModel, ModelConfig
from aengine.model.spec.feed_forward import ExpertsSpec, MLPAndExpertsSpec
from aengine.model.spec.layer import LayerSpec


def layer_borders(model: ModelConfig, dtype: torch.dtype, launch: Launch, most: int) -> set[int]:
    """Return the numbers of rows below `most` after which products of the model's layers use other kernels.

    dtype: the model's.
    """
    shapes = {shape for layer in model.layers for shape in layer.linears(model.hidden_size, model.ranks)}
    return _borders(model, model.layers, model.hidden_size, shapes, dtype, launch, most)


def head_borders(model: ModelConfig, dtype: torch.dtype, launch: Launch, most: int) -> set[int]:
    """Return the same for the model's draft head, its output matrix included. Empty if the model has none."""
    if isinstance(head := model.added_head, DraftModel):
        drafting = head.model.spread_over(head.spread_over(model.ranks))
        return layer_borders(drafting, dtype, launch, most) | output_borders(drafting, launch, most)
    if head is not None:
        ranks, width = head.spread_over(model.ranks), head.hidden_size
        shapes = {*head.linears(model.ranks), (-(-head.draft_vocab_size // ranks), width)}
        if not head.has_head:
            shapes.add(output_shape(model))
        return _borders(model, head.layers, width, shapes, dtype, launch, most, drafting=True)
    if model.drafting and model.mtp is not None:
        shapes = {*model.mtp.linears(model.hidden_size, model.ranks), output_shape(model)}
        return _borders(model, [model.mtp.layer], model.hidden_size, shapes, dtype, launch, most, drafting=True)
    return set()


def output_borders(model: ModelConfig, launch: Launch, most: int) -> set[int]:
    """Return the same for the model's output matrix."""
    return _linear_borders(model, {output_shape(model)}, launch, most)


def output_shape(model: ModelConfig) -> tuple[int, int]:
    """Return outputs and inputs of the output matrix, on each rank."""
    return -(-model.vocab_size // model.ranks), model.hidden_size


def _borders(
    model: ModelConfig,
    layers: Iterable[LayerSpec],
    hidden: int,
    shapes: set[tuple[int, int]],
    dtype: torch.dtype,
    launch: Launch,
    most: int,
    drafting: bool = False,
) -> set[int]:
    ffns = [layer.ffn for layer in layers if layer.ffn is not None]
    specs = [ffn.experts if isinstance(ffn, MLPAndExpertsSpec) else ffn for ffn in ffns]
    borders: set[int] = set()
    if experts := [spec for spec in specs if isinstance(spec, ExpertsSpec)]:
        from aengine.kernels.experts.config import experts_borders  # imports the kernels of experts

        for spec in experts:
            borders |= set(experts_borders(spec.router.top_k, spec.count, hidden, launch, most))
    borders |= _linear_borders(model, shapes, launch, most, drafting and dtype.itemsize == 2 and launch.fp8)
    # `linears` lists gate_up, then down.
    gates = {shape for ffn in ffns for shape in ffn.linears(hidden, model.ranks)[::2]}
    for (outputs, inputs), least in itertools.product(gates, {1, DENSE_ROWS if model.has_4_bits else 1}):
        rows = range(least, most + 1)
        first = fewest_rows(outputs // 2, inputs, dtype.itemsize, launch, rows)
        if first is not None:  # some larger steps do not use the kernel, so a step of exactly this size is run
            for tokens in {first, min(2, model.ranks) * first}:  # several ranks may compute a step in two halves
                borders |= {tokens - 1, tokens}
    return borders


def _linear_borders(
    model: ModelConfig, shapes: set[tuple[int, int]], launch: Launch, most: int, to_fp8: bool = False
) -> set[int]:
    classes = model.weight_classes | ({Fp8Weight} if to_fp8 else set())
    kinds = [dense_borders, *(kind for weight, kind in LINEAR_BORDERS.items() if weight in classes)]
    return {border for kind in kinds for n, k in shapes for border in kind(n, k, launch, most)}
