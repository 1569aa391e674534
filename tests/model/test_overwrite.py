"""New numbers where the old ones lay, in every form that kernels keep weights in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.linear.fp8.scales import kernel_scales
from aengine.kernels.linear.int4.packed_codes import pack_codes
from aengine.kernels.linear.weights import Fp8Weight, Int4Weight
from aengine.model.dense import in_fp8
from aengine.model.overwrite import overwrite


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
    "fp8 experts": lambda seed: Matrices.of_fp8(fp8(seed, 3)),
    "int4": lambda seed: pack_codes(int4(seed)),
    "int4 experts": lambda seed: PackedMatrices.of(int4(seed, 3)),
    "several": lambda seed: [Matrices(torch.full((1, 2, 2), float(seed))), (pack_codes(int4(seed)), None, 3)],
}


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
        (lambda: PackedMatrices.of(int4(1, 2)), lambda: PackedMatrices.of(int4(2, 3)), "words"),
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
