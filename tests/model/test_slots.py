"""Slots use what is loaded. A reload overwrites weights of every kernel in place if graphs may have captured them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels import triton_kernels
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.products import float_experts, fp8_experts, packed_experts
from aengine.kernels.experts.torch_experts import TorchExperts
from aengine.kernels.launch import Launch
from aengine.kernels.linear.base import Registered, RegisteredLinear
from aengine.kernels.linear.fp8 import library as fp8_library
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.fp8.few_rows import Fp8FewRows
from aengine.kernels.linear.fp8.library import LibraryFp8
from aengine.kernels.linear.fp8.linear import Fp8Linear
from aengine.kernels.linear.fp8.quantize import kernel_scales
from aengine.kernels.linear.int4.launch import Int4Product
from aengine.kernels.linear.int4.linear import Int4Linear
from aengine.kernels.linear.int4.packed_codes import pack_codes
from aengine.kernels.linear.small_linear import SmallLinear
from aengine.kernels.linear.torch_linear import TorchLinear
from aengine.kernels.linear.triton_linear import TritonLinear
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.kernels.torch_kernels import TorchKernels
from aengine.kernels.triton_kernels import TritonKernels
from aengine.model.dense import in_fp8
from aengine.model.slots import ExpertsSlot, LinearSlot, captured, overwrite


def fp8(seed: int, experts: int | None = None) -> Fp8Weight:
    shape = (256, 256) if experts is None else (experts, 256, 256)
    return in_fp8(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def int4(seed: int, experts: int | None = None, zero: bool = True) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    lead = () if experts is None else (experts,)
    codes = torch.randint(0, 16, (*lead, 32, 256), generator=generator, dtype=torch.uint8)
    scale = torch.rand((*lead, 32, 2), generator=generator)
    zeros = torch.randint(0, 16, (*lead, 32, 2), generator=generator, dtype=torch.uint8) if zero else None
    return Int4Weight(codes, scale, zeros)


FORMS: dict[str, Callable[[int], object]] = {
    "fp8 scales": lambda seed: kernel_scales(fp8(seed)),
    "fp8 experts": lambda seed: Matrices.from_fp8(fp8(seed, 3)),
    "int4": lambda seed: pack_codes(int4(seed)),
    "int4 experts": lambda seed: PackedMatrices.from_weight(int4(seed, 3)),
    "several": lambda seed: [Matrices(torch.full((1, 2, 2), float(seed))), (pack_codes(int4(seed)), None, 3)],
}


def dense(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def library_of(weight: Fp8Weight, monkeypatch: pytest.MonkeyPatch) -> Fp8Linear:
    """Return a linear as on a Hopper GPU, whose product in pieces is the library's."""
    monkeypatch.setattr(LibraryFp8, "fits", lambda _: True)
    monkeypatch.setattr(fp8_library, "pieces_of_k", lambda *_: 2)
    return Fp8Linear(weight, None, Fp8FewRows(), BlockProducts())


Make = Callable[[int, pytest.MonkeyPatch], Any]
MADE: dict[str, Make] = {
    "torch": lambda seed, _: TorchLinear(dense(seed, 8, 8), dense(seed, 8)),
    "floats": lambda seed, _: TritonLinear(dense(seed, 8, 8), dense(seed, 8), SmallLinear()),
    "fp8": lambda seed, _: Fp8Linear(fp8(seed), dense(seed, 256), Fp8FewRows(), BlockProducts()),
    "fp8 by the library": lambda seed, monkeypatch: library_of(fp8(seed), monkeypatch),
    "int4": lambda seed, _: Int4Linear(int4(seed), dense(seed, 32), Int4Product(), torch.float32),
    "experts by torch": lambda seed, _: TorchExperts(dense(seed, 2, 8, 4), dense(seed, 2, 4, 4)),
    "experts": lambda seed, _: float_experts(dense(seed, 2, 8, 4), dense(seed, 2, 4, 4)),
    "fp8 experts": lambda seed, _: fp8_experts(in_fp8(dense(seed, 2, 256, 128)), in_fp8(dense(seed + 9, 2, 128, 128))),
    "int4 experts": lambda seed, _: packed_experts(
        Int4Weight(torch.ones(2, 64, 32, dtype=torch.uint8), dense(seed, 2, 64, 1)),
        Int4Weight(torch.ones(2, 32, 32, dtype=torch.uint8), dense(seed, 2, 32, 1)),
    ),
}  # fmt: skip
SHARED = (
    SmallLinear,
    Fp8FewRows,
    BlockProducts,
    Int4Product,
)  # shared by linears; not memory of a weight


def reachable(thing: object) -> Iterator[Tensor]:
    """Yield every tensor that an object holds, whether or not it is registered."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from reachable(part)
    elif type(thing).__module__.startswith("aengine.") and not isinstance(thing, SHARED):
        slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
        for name in [*getattr(thing, "__dict__", ())] or slots:
            yield from reachable(getattr(thing, name))


@pytest.mark.parametrize("form", MADE)
def test_everything_that_is_made_of_a_weight_is_registered(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = (MADE[form](seed, monkeypatch) for seed in (1, 2))
    places = [one.data_ptr() for one in reachable(kept)]
    assert isinstance(kept, Registered)
    assert len(places) > 1
    kept.later = torch.ones(3)  # kept between calls
    overwrite(kept, made)
    del kept.later
    assert [one.data_ptr() for one in reachable(kept)] == places
    for old, new in zip(reachable(kept), reachable(made), strict=True):
        assert torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8))


def test_a_slot_calls_the_loaded_linear_itself() -> None:
    slot, x = LinearSlot(8, 8), dense(3, 2, 8)
    with pytest.raises(AttributeError):
        slot.apply(x)
    for seed in (1, 2):  # without a GPU, a reload replaces the linear
        made = TorchLinear(dense(seed, 8, 8), None)
        slot.load(made)
        assert (slot.apply, slot.apply_activated) == (made.apply, made.apply_activated)
        assert slot.unadapted is made


def test_a_slot_calls_the_linear_that_adapters_were_added_to() -> None:
    made, adapted = (TorchLinear(dense(seed, 8, 8), None) for seed in (1, 2))
    slot = LinearSlot(8, 8, lambda linear: adapted if linear is made else linear)
    slot.load(made)
    assert (slot.apply, slot.unadapted) == (adapted.apply, made)


class Doubling(TorchKernels):
    def rounded(self, linear: RegisteredLinear) -> RegisteredLinear:
        weight = linear.parameters["weight"]
        assert isinstance(weight, Tensor)
        return TorchLinear(2 * weight, None)


@pytest.mark.parametrize("asked", ["before it is loaded", "after"])
def test_a_rounded_copy_follows_the_slot(asked: str) -> None:
    slot, x = LinearSlot(8, 8), dense(3, 2, 8)
    copies = [slot.rounded(Doubling())] if asked != "after" else []
    slot.load(TorchLinear(dense(1, 8, 8), None))
    copy = copies[0] if copies else slot.rounded(Doubling())
    for seed in (1, 2):
        slot.load(TorchLinear(dense(seed, 8, 8), None))
        assert torch.equal(copy.apply(x), 2 * slot.apply(x))


def test_a_rounded_copy_is_renewed_after_a_reload_in_place() -> None:
    slot, weight, x = LinearSlot(8, 8), dense(1, 8, 8), dense(3, 2, 8)
    slot.load(TorchLinear(weight, None))
    copy = slot.rounded(Doubling())
    weight.copy_(dense(2, 8, 8))
    assert not torch.equal(copy.apply(x), 2 * slot.apply(x))
    slot.renew_copy()
    assert torch.equal(copy.apply(x), 2 * slot.apply(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_kernels_round_16_bit_floats_to_fp8(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "launch_for", lambda device: Launch(132, True, 2**17, (9, 0)))
    kernels, weight = TritonKernels(), dense(1, 256, 256).to(dtype)
    made = kernels.dense(weight, None)
    rounded = kernels.rounded(made)
    assert (rounded is made) == (dtype == torch.float32)
    if isinstance(rounded, Fp8Linear):
        codes, scales = rounded.parameters["weight"], rounded.parameters["scales"]
        near = Fp8Weight(codes, scales.scale, (128, 128), "group").dequantize()  # type: ignore[arg-type, attr-defined]
        assert (near - weight.float()).norm() < 0.04 * weight.float().norm()


def test_a_slot_keeps_a_captured_linear_and_overwrites_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (TorchLinear(dense(seed, 8, 8), None) for seed in (1, 2))
    slot = LinearSlot(8, 8)
    slot.load(first)
    monkeypatch.setattr("aengine.model.slots.captured", lambda _: True)
    slot.load(second)
    assert slot.apply == first.apply
    assert torch.equal(slot.apply(torch.eye(8)), second.apply(torch.eye(8)))


@pytest.mark.parametrize("first", [0, 2])
def test_experts_of_a_rank_are_called_with_the_models_numbers(first: int) -> None:
    slot = ExpertsSlot(2, 4, first=first)
    made = TorchExperts(dense(1, 2, 8, 4), dense(2, 2, 4, 4))
    slot.load(made)
    h, weights = dense(3, 3, 4), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [1, 5], [-1, 0]], dtype=torch.int32)
    expected = made.add_to(h, ids, weights, None)
    assert torch.equal(slot.add_to(h, ids + first, weights, None), expected)
    if not first:
        assert slot.add_to == made.add_to


def test_a_linear_is_captured_where_a_tensor_of_it_lies_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = MADE["fp8 by the library"](1, monkeypatch)
    assert not captured(linear)
    held: Any = SimpleNamespace(parameters={"several": [(None, Matrices(SimpleTensor(dense(1, 1, 2, 2))))]})
    assert captured(held)


class SimpleTensor(Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


def tensors(thing: object) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors(part)
    else:
        for name in getattr(type(thing), "__slots__", ()):
            yield from tensors(getattr(thing, name))


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_the_new_ones_and_lie_where_the_old_ones_did(form: str) -> None:
    kept, made = FORMS[form](1), FORMS[form](2)
    places = [one.data_ptr() for one in tensors(kept)]
    assert places
    overwrite(kept, made)
    assert [one.data_ptr() for one in tensors(kept)] == places
    for old, new in zip(tensors(kept), tensors(made), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize(
    ("kept", "made", "where"),
    [
        (lambda: PackedMatrices.from_weight(int4(1, 2)), lambda: PackedMatrices.from_weight(int4(2, 3)), "words"),
        (lambda: pack_codes(int4(1)), lambda: Matrices(torch.zeros(1, 2, 2)), "PackedCodes"),
        (lambda: Matrices(torch.zeros(1, 2, 2)), lambda: Matrices(torch.zeros(1, 2, 3)), "weight"),
        (lambda: Matrices(torch.zeros(1, 2, 2), rows=1), lambda: Matrices(torch.ones(1, 2, 2), rows=2), "rows"),
        (lambda: [torch.zeros(2), torch.zeros(3)], lambda: [torch.ones(2)], "list"),
    ],
)
def test_what_differs_in_more_than_numbers_is_refused_before_anything_is_copied(
    kept: Callable[[], object], made: Callable[[], object], where: str
) -> None:
    old = kept()
    before = [one.clone() for one in tensors(old)]
    with pytest.raises(WeightsError, match=where):
        overwrite(old, made())
    for one, copy in zip(tensors(old), before, strict=True):
        assert torch.equal(one.view(torch.uint8), copy.view(torch.uint8))
