"""Parts that towers are made of. They compute norms and rotations in float32, for any dtype of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.groups import Entry, PlainTensor
from aengine.model.images.tower_specs import TowerActivation
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part


@dataclass(frozen=True, slots=True)
class TowerOps:
    """What towers compute with kernels of their device. Their products are torch's: ours depend on the sizes."""

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]  # `Kernels.rotate`
    attend_whole: Callable[[Tensor, Tensor, Tensor, float], Tensor]  # `AttentionBackend.attend_whole`

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
        """Return attention of all tokens of an image to each other, [tokens, heads * dim].

        Images of the same length that follow each other are one launch.

        Args:
            q, k, v: [tokens, heads, dim].
            lengths: The number of tokens of each image.
        """
        parts, start = [], 0
        for length, same in groupby(lengths):
            count = sum(1 for _ in same)
            end = start + count * length
            some_q, some_k, some_v = (one[start:end].unflatten(0, (count, length)) for one in (q, k, v))
            parts.append(self.attend_whole(some_q, some_k, some_v, scale).flatten(0, 1))
            start = end
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


class LayerNorm:
    """A norm that also subtracts the mean, with a weight and a bias."""

    def __init__(self, make: Parameters, name: str, width: int, eps: float) -> None:
        self._weight, self._bias = (make.tensor(f"{name}.{one}", width) for one in ("weight", "bias"))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class PatchEmbedding:
    """Multiplies each patch with a matrix, which checkpoints store as the weight of a convolution."""

    def __init__(self, make: Parameters, name: str, hidden: int, patch: int, bias: bool, frames: int = 0) -> None:
        """frames: the depth of the convolution. An image is repeated so often. 0: it has no depth."""
        self._frames = max(frames, 1)
        stored = (hidden, 3, frames, patch, patch) if frames else (hidden, 3, patch, patch)
        inputs = 3 * self._frames * patch * patch
        self._weight = stored_as(make, f"{name}.weight", Entry((hidden, inputs), other_shapes=(stored,)))
        self._bias = make.tensor(f"{name}.bias", hidden) if bias else None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [patches, 3 * patch * patch] -> [patches, hidden]."""
        weight = self._weight
        if self._frames > 1:  # all frames are the same image
            weight = weight.view(len(weight), 3, self._frames, -1).sum(2).flatten(1)
        return F.linear(rows, weight, self._bias)


class TwoLayers:
    """An MLP without a gate."""

    def __init__(
        self, make: Parameters, names: tuple[str, str], sizes: tuple[int, int, int], kind: TowerActivation,
        bias: bool = True,
    ) -> None:  # fmt: skip
        """names: of both matrices. sizes: of inputs, between them, and of outputs."""
        inputs, inner, outputs = sizes
        self._first = make.linear({names[0]: Part(inner)}, inputs, bias)
        self._second = make.linear({names[1]: Part(outputs)}, inner, bias)
        self._kind = kind

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._second.apply(activate(self._first.apply(x), self._kind), residual=residual)


def stored_as(make: Parameters, name: str, entry: Entry) -> Tensor:
    """Register a tensor that is used as it is, with an entry of its own."""
    tensor = make.tensor(name, *entry.shape)
    make.groups[-1] = PlainTensor(name, tensor, entry=entry)
    return tensor


def activate(x: Tensor, kind: TowerActivation) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def angles_of(places: Tensor, frequencies: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `Kernels.rotate`: one piece, with those of rows, then those of columns.

    places: of `PatchBatch`. frequencies: of rows and of columns, float32 on the same device.
    """
    whole = torch.cat([places[:, i : i + 1] * one for i, one in enumerate(frequencies)], dim=1)
    whole = whole.unsqueeze(1)
    return whole.cos(), whole.sin()


def frequencies(theta: float, size: int, device: torch.device) -> Tensor:
    """Return theta ** -(0, 2, 4... / size), float32. Computed on the CPU, so that all devices have the same."""
    return (1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))).to(device)
