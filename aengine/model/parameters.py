"""Builds the norms, linears and experts of blocks, and registers the tensors that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from aengine.errors import ConfigError, UnsupportedModelError
from aengine.kernels.base import Kernels, Route
from aengine.kernels.collective.base import Collective
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.layer_norm import LayerNorm
from aengine.model.activations import XieluParameters
from aengine.model.dense import FloatExperts, FloatLinear, Storage, StoredMatrix, TransposedExperts, expert_biases
from aengine.model.groups import Cut, Entry, Group, PlainTensor
from aengine.model.kv_scales import LoadedKVScales
from aengine.model.lora.memory import AdapterMemory
from aengine.model.lora.room import LoraRoom
from aengine.model.quant.base import LinearFormat, QuantConfig
from aengine.model.quant.groups import DequantizedMatrix, QuantizedExperts, QuantizedLinear, columns_divide
from aengine.model.quant.read_plan import row_multiple
from aengine.model.ranks.shard import ExpertsShare, Part, Range, Shard, Split, width
from aengine.model.ranks.sharded import Embedding, PreparedNorm, Sum, SummedEmbedding, SummedNorm
from aengine.model.slots import ExpertsSlot, Head, LinearSlot
from aengine.model.spec.feed_forward import ExpertsSpec
from aengine.model.spec.layer import NormSpec

HEAD = "lm_head"  # the output matrix in checkpoints; in adapters also if it is the embedding

Embed = Callable[[Tensor], Tensor]  # token ids [tokens] -> their rows [tokens, hidden]


class Parameters:
    """Makes the parameters of one model on one device, and lists their groups in order. "meta": shapes without memory.

    No group refers to this object. So there is no reference cycle, and weights are freed without a garbage collection.
    """

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantConfig | None = None,
        kv_dtype: torch.dtype | None = None,
        to_fp8: bool = False,
        ranks: Collective | None = None,
        lora: LoraRoom | None = None,
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        """Args:
        quantization: the formats of linears and experts in the checkpoint. None: all are floats.
        kv_dtype: the dtype of the KV cache. None: `dtype`.
        to_fp8: whether matrices of floats are quantised while they are loaded.
        ranks: the ranks that the model is spread over. None: one device holds all of it.
        lora: the size of the memory for adapters. None: there are no adapters.
        ignored_prefixes: of names of modules in unused parts of the model. Adapters may have factors for them.
        """
        self.ranks = ranks
        self.adapters = None if lora is None else AdapterMemory(lora, kernels, dtype, device, ignored_prefixes)
        self._last_sum: Sum | None = None  # the next norm that is made belongs to it
        # If linears round their inputs, the pass that rounds also computes the norm.
        self._rounds_inputs = to_fp8 or (quantization is not None and quantization.rounds_inputs)
        self.shard = Shard() if ranks is None else Shard(ranks.index, ranks.count)
        self._to_fp8 = to_fp8
        self.kernels = kernels
        self._quantization = quantization
        self.groups: list[Group] = []
        self._storage = Storage(kernels, dtype, device)
        self._kv_dtype = kv_dtype or dtype

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.dtype

    @property
    def quantizes(self) -> bool:
        """Whether some or all matrices are quantised."""
        return self._to_fp8 or self._quantization is not None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Register a tensor that is used as it is."""
        tensor = self._storage.empty(*shape)
        self.groups.append(PlainTensor(name, tensor))
        return tensor

    def rows(self, name: str, parts: Part | tuple[Part, ...], *inner: int, dtype: torch.dtype | None = None) -> Tensor:
        """Register a tensor [outputs, ...] whose rows are divided among ranks.

        dtype: None means the model's dtype.
        """
        ranges = self.shard.ranges(parts)
        kept = sum(last - first for first, last in ranges)
        dtype = dtype or self._storage.dtype
        tensor = torch.empty((kept, *inner), dtype=dtype, device=self._storage.device)
        cut = None if self.ranks is None else Cut(0, ranges)
        self.groups.append(PlainTensor(name, tensor, entry=Entry((width(parts), *inner), cut=cut)))
        return tensor

    def matrix(self, name: str, parts: Part | tuple[Part, ...], inputs: int) -> Tensor:
        """Register a matrix [outputs, inputs] that is not used as a linear. Its rows are divided among ranks.

        If it is quantised in the checkpoint, it is dequantised while it is loaded.
        """
        form = None if self._quantization is None else self._quantization.format_of(name)
        if form is None:
            return self.rows(f"{name}.weight", parts, inputs)
        stored = StoredMatrix(width(parts), inputs, rows=None if self.ranks is None else self.shard.ranges(parts))
        matrix = self._storage.empty(*stored.kept)
        self.groups.append(DequantizedMatrix(matrix, name, stored, form, self._storage))
        return matrix

    def norm_weight(self, name: str, part: Part, offset: float = 0.0) -> Tensor:
        """Register the weight of a norm. If it has several units, they are divided among ranks.

        offset: is added to the weight. The sum is in float32.
        """
        entry = None
        kept = part.width
        if self.ranks is not None and part.units > 1:
            first, last = self.shard.range(part)
            kept, entry = last - first, Entry((part.width,), cut=Cut(0, ((first, last),)))
        if not offset:
            weight = self._storage.empty(kept)
            self.groups.append(PlainTensor(f"{name}.weight", weight, entry=entry))
            return weight
        weight = torch.empty(kept, dtype=torch.float32, device=self._storage.device)

        def ready() -> None:
            weight.add_(offset)

        self.groups.append(PlainTensor(f"{name}.weight", weight, ready, entry))
        return weight

    def sinks(self, name: str, heads: Part) -> Tensor:
        """Register one score for each head of a rank, float32. name: of the attention in the checkpoint."""
        first, last = self.shard.range(heads)
        sinks = torch.empty(last - first, dtype=torch.float32, device=self._storage.device)
        entry = Entry((heads.width,), cut=None if self.ranks is None else Cut(0, ((first, last),)))
        self.groups.append(PlainTensor(f"{name}.sinks", sinks, entry=entry))
        return sinks

    def xielu(self, name: str) -> Tensor:
        """Register the parameters of an activation. name: in the checkpoint."""
        parameters = XieluParameters(name, self._storage.device)
        self.groups.append(parameters)
        return parameters.values

    def scaled_norm(self, name: str, width: int, factor: float, eps: float) -> Norm:
        """Make a norm over the hidden size. Its weight is the tensor `name`, times `factor`."""
        weight = torch.empty(width, dtype=torch.float32, device=self._storage.device)

        def ready() -> None:
            weight.mul_(factor)

        self.groups.append(PlainTensor(name, weight, ready))
        return self.kernels.norm(weight, eps)

    def kv_scales(self, name: str) -> LoadedKVScales:
        """Register the scales of a layer's KV cache. name: of the attention in the checkpoint."""
        scales = LoadedKVScales(name, self._storage.device, self._kv_dtype)
        self.groups.append(scales)
        return scales

    def norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> Norm:
        """Make an RMS norm, as `specified_norm` does."""
        return self.specified_norm(NormSpec(name, eps, offset), width)

    def specified_norm(self, spec: NormSpec, width: int, layer: str = "") -> Norm:
        """Make a norm over the hidden size. Call this in the order of computation: the sum made before computes it.

        layer: the layer's name in checkpoints. Empty: the norm is not in a layer.
        """
        name = f"{layer}.{spec.name}" if layer else spec.name
        weight = self.norm_weight(name, Part(1, width), spec.offset)
        norm: Norm = self.kernels.norm(weight, spec.eps)
        if spec.centred:
            norm = LayerNorm(weight, spec.eps, self.tensor(f"{name}.bias", width) if spec.bias else None)
        if self.ranks is None or self._rounds_inputs:
            return norm
        prepared = PreparedNorm(norm, self.ranks)
        if self._last_sum is not None:
            self._last_sum.norm, self._last_sum = prepared, None
        return prepared

    def layer_norm(self, layer: str, spec: NormSpec | None, width: int) -> Norm | None:
        """Make a norm of a layer. Returns None if there is no such norm."""
        return None if spec is None else self.specified_norm(spec, width, layer)

    def sum(self, prepares: bool = True) -> Sum | None:
        """Make the sum over ranks at the end of a block. Returns None if one device holds the model.

        prepares: whether it also computes the norm that is made next.
        """
        if self.ranks is None:
            return None
        return self._sum(self.ranks) if prepares else Sum(self.ranks)

    def _sum(self, ranks: Collective) -> Sum:
        self._last_sum = Sum(ranks)
        return self._last_sum

    def wide_norm(self, name: str, part: Part, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm over all heads of a token together."""
        weight = self.norm_weight(name, part, offset)
        if self.ranks is None:
            return self.kernels.norm(weight, eps)
        copies = max(1, self.shard.count // part.units)
        return SummedNorm(weight, eps, part.width, copies, self.ranks)

    def linear(
        self,
        parts: Mapping[str, Part | tuple[Part, ...]],
        inputs: int,
        bias: bool = False,
        floats: bool = False,
        split: Split | None = None,
        rows: Mapping[str, tuple[Range, ...]] | None = None,
    ) -> LinearSlot:
        """Make a linear from one matrix, or from several fused matrices.

        parts: the outputs of each matrix, in order, by its name in the checkpoint. A tuple: it has several parts.
        floats: whether the linear stays in floats even if the checkpoint's configuration says that it is quantised.
        split: divide the outputs or the inputs among ranks. If inputs are split, results must be summed over ranks.
        rows: the rows of each matrix that this rank keeps. Empty: `split` decides.
        """
        if rows:
            return self._linear(
                {name: StoredMatrix(width(part), inputs, rows[name]) for name, part in parts.items()}, bias, floats
            )
        if self.ranks is None or split is None:
            whole = {name: StoredMatrix(width(part), inputs) for name, part in parts.items()}
            return self._linear(whole, bias, floats)
        if split == "outputs":
            stored = {
                name: StoredMatrix(width(part), inputs, rows=self.shard.ranges(part)) for name, part in parts.items()
            }
            return self._linear(stored, bias, floats)
        columns = self.shard.range(Part(inputs))
        stored = {name: StoredMatrix(width(part), inputs, columns=columns) for name, part in parts.items()}
        # Ranks sum their products, so only one adds the bias.
        return self._linear(stored, bias and self.shard.index == 0, floats)

    def _linear(
        self,
        parts: Mapping[str, StoredMatrix],
        bias: bool,
        floats: bool,
        outputs: int | None = None,
    ) -> LinearSlot:
        """Make a linear. outputs: None: those of all parts. If there are more, the last outputs are zero."""
        kept = [part.kept for part in parts.values()]
        outputs = outputs or sum(rows for rows, _ in kept)
        linear = self._slot(parts, kept[0][1], outputs)
        form = None if self._quantization is None or floats else self._quantization.format_of(*parts)
        to_fp8 = self._to_fp8 and linear.outputs >= GROUP and "lm_head" not in parts
        self.groups.append(
            FloatLinear(linear, parts, bias, self._storage, to_fp8)
            if form is None
            else QuantizedLinear(linear, parts, bias, form, self._storage)
        )
        return linear

    def _slot(self, parts: Mapping[str, StoredMatrix], inputs: int, outputs: int) -> LinearSlot:
        """Make the slot of a linear, with memory for its adapters if there are any."""
        memory = self.adapters
        weights = None if memory is None else memory.site(parts, inputs, outputs)
        if memory is None or weights is None:
            return LinearSlot(inputs, outputs)
        return LinearSlot(inputs, outputs, partial(memory.adapted, weights=weights))

    def shared_gate(self, name: str, hidden: int) -> tuple[Tensor, Linear]:
        """Make the gate of a shared expert. Returns a row [1, hidden], and the row as a linear for adapters."""
        row, kernels = self._storage.empty(1, hidden), self.kernels
        linear = self._slot({name: StoredMatrix(1, hidden)}, hidden, 1)
        self.groups.append(PlainTensor(f"{name}.weight", row, lambda: linear.load(kernels.dense(row, None))))
        return row, linear

    def experts(self, name: str, hidden: int, spec: ExpertsSpec) -> ExpertsSlot:
        """Make a layer's experts, or this rank's share of them. Results must be summed over ranks.

        name: the checkpoint's name for all of them.
        """
        forms = self._forms(name, spec)
        share = self._share(name, hidden, spec, forms)
        memory = self.adapters
        adapters = None if memory is None else memory.experts(name, hidden, spec, share)
        adapt = None if memory is None or adapters is None else partial(memory.adapted_experts, weights=adapters)
        experts = ExpertsSlot(share.count, hidden, adapt, share.experts[0])
        biases = None
        if spec.biases:
            another = share.columns is not None and self.shard.index > 0
            biases, groups = expert_biases(name, hidden, spec, share, self._storage, another)
            self.groups.extend(groups)
        rule = ExpertRule(spec.clamp, biases, spec.activation == "gelu", spec.gated)
        if forms is not None:
            self.groups.append(QuantizedExperts(experts, name, spec, forms, self._storage, share, rule))
        elif not spec.alternating:
            self.groups.append(FloatExperts(experts, name, spec, self._storage, share, self._to_fp8, rule))
        elif self._to_fp8:
            raise ConfigError(f"quantization: the experts of {name} cannot become FP8 while they are loaded; use auto")
        else:
            self.groups.append(TransposedExperts(experts, name, spec, self._storage, share, rule))
        return experts

    def _share(
        self, name: str, hidden: int, spec: ExpertsSpec, forms: tuple[LinearFormat, LinearFormat] | None
    ) -> ExpertsShare:
        """Return this rank's share of the experts.

        The share is some columns of every expert, which balances the work. If columns cannot be divided, it is some
        whole experts.
        """
        if self.ranks is None:
            return ExpertsShare((0, spec.count))
        count, width = self.shard.count, spec.inner // self.shard.count
        divide = spec.inner % count == 0 and (
            forms is None or columns_divide(forms[1], name, hidden, spec.inner, width)
        )
        # Kernels for quantised experts need whole groups of columns if the experts have such groups.
        whole = (forms is None and not self._to_fp8) or width % GROUP == 0 or spec.inner % GROUP != 0
        if divide and (whole or spec.count < count):
            return ExpertsShare((0, spec.count), self.shard.range(Part(spec.inner)))
        if spec.count < count:
            raise ConfigError(
                f"tensor_parallel_size: neither the {spec.count} experts of {name} nor their {spec.inner} columns can "
                f"be divided among {count} ranks; lower it"
            )
        return ExpertsShare(self.shard.experts(spec.count))

    def _forms(self, name: str, spec: ExpertsSpec) -> tuple[LinearFormat, LinearFormat] | None:
        """Return the formats of gate and up, and of down. Raises `UnsupportedModelError` if only some are quantised."""
        if self._quantization is None or self._quantization.leaves(name):
            return None
        names = [f"{name}.{expert}.{{}}" for expert in range(spec.count)]
        gate_up = self._quantization.format_of(*(one.format(part) for one in names for part in spec.before_down))
        down = self._quantization.format_of(*(one.format(spec.down) for one in names))
        if gate_up is None and down is None:
            return None
        if gate_up is None or down is None:
            raise UnsupportedModelError(f"{name}: some of an expert's matrices are quantised, others are not")
        return gate_up, down

    def route(self, block: str, hidden: int, spec: ExpertsSpec) -> Route:
        """Make a layer's router. block: the name of its mixture in the checkpoint."""
        name = f"{block}.{spec.router_name}"
        weight = self.tensor(f"{name}.weight", spec.count, hidden)
        correction = None
        if spec.correction:  # in float32, because small differences decide which experts are chosen
            correction = torch.empty(spec.count, dtype=torch.float32, device=self._storage.device)
            entry = Entry((spec.count,), other_shapes=((1, spec.count),))
            self.groups.append(PlainTensor(f"{block}.{spec.correction}", correction, entry=entry))
        bias = self.tensor(f"{name}.bias", spec.count) if spec.biases else None
        return self.kernels.route(weight, correction, spec.router, bias)

    def embedding(self, name: str, count: int, width: int, head: str | None, bias: bool = False) -> tuple[Embed, Head]:
        """Make the embedding [count, width] and the output matrix.

        Tables of all ranks have the same size. The last ranks may have fewer tokens. Then their tables end with zeros.

        head: the name of the output matrix. None: it is the embedding. bias: whether the output matrix has a bias.
        """
        first, last = self.shard.rows(count)
        rows = self.shard.rows_per_rank(count)
        table, kernels = self._storage.empty(rows, width), self.kernels
        table[last - first :].zero_()

        entry = None if self.ranks is None else Entry((count, width), cut=Cut(0, ((first, last),)))
        kept = table[: last - first]
        if head is None:
            tied = self._slot({HEAD: StoredMatrix(count, width, rows=((first, last),) if entry else None)}, width, rows)
            self.groups.append(
                PlainTensor(f"{name}.weight", kept, lambda: tied.load(kernels.dense(table, None)), entry)
            )
        else:
            self.groups.append(PlainTensor(f"{name}.weight", kept, entry=entry))
        output = Head(tied, self.ranks, count) if head is None else self.head(head, count, width, bias)
        if self.ranks is None:
            return Embedding(table), output
        return SummedEmbedding(table, self.shard.index * rows, self._sum(self.ranks)), output

    def head(self, name: str, count: int, width: int, bias: bool = False) -> Head:
        """Make an output matrix [count, width]. Its rows are divided among ranks."""
        stored, outputs = StoredMatrix(count, width), count
        if self.ranks is not None:
            form = None if self._quantization is None else self._quantization.format_of(name)
            multiple = 1 if form is None else row_multiple(form.stored(name, count, width))
            stored = StoredMatrix(count, width, rows=(self.shard.rows(count, multiple),))
            outputs = self.shard.rows_per_rank(count, multiple)
        return Head(self._linear({name: stored}, bias, floats=False, outputs=outputs), self.ranks, count)
