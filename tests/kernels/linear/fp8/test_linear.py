from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.layer_norm import LayerNorm
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight
from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import BLOCKS, exact_product, exact_weight, random_inputs, random_weight

fp8_linear = pytest.importorskip("aengine.kernels.linear.fp8.linear")
few_rows = pytest.importorskip("aengine.kernels.linear.fp8.few_rows")
elementwise = pytest.importorskip("aengine.kernels.elementwise")

NARROW = {"cuda": torch.bfloat16, "cpu": torch.float16}  # the interpreter has no bfloat16 arithmetic


@pytest.mark.gpu
@pytest.mark.thinned(where=lambda m, **_: m not in (64, 300))
@pytest.mark.parametrize("kind", ["group", "token", "static"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        pytest.param(1, 24, 272, id="tiny-one"),
        pytest.param(3, 136, 272, id="tiny-few"),
        pytest.param(66, 136, 272, id="tiny-many"),
        (1, 6144, 4096),
        (64, 4096, 12288),
        (200, 4096, 12288),
        (300, 24576, 4096),
        (2500, 6144, 4096),
    ],
)
def test_one_row_meets_the_exact_weight_and_many_the_formats_arithmetic(
    m: int, n: int, k: int, block: str, kind: Activations, device: torch.device
) -> None:
    weight = random_weight(n, k, BLOCKS[block], device, kind)
    dtype = NARROW[device.type]
    x, bias = random_inputs(m, k, device).to(dtype), torch.randn(n, device=device).to(dtype)
    residual = torch.randn(m, n, device=device).to(dtype)
    linear = fp8_linear.Fp8Linear(weight, bias, few_rows.Fp8FewRows(), BlockProducts())
    unrounded = m == 1 or (m <= 64 and kind != "group")
    expected = (x.double() @ exact_weight(weight).T if unrounded else exact_product(x, weight)) + bias.double()
    assert (linear.inputs, linear.outputs) == (k, n)
    assert relative_error(linear.apply(x), expected) < 5e-3
    assert relative_error(linear.apply(x, residual=residual.clone()), expected + residual.double()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        pytest.param(1, 24, 256, id="tiny-one"),
        pytest.param(3, 136, 272, id="tiny-few"),
        pytest.param(66, 136, 272, id="tiny-many"),
        (16, 6144, 4096),
        (256, 6144, 4096),
        (96, 4096, 12288),
        (200, 4096, 12288),
    ],
)
def test_norms_and_gates_before_a_product_are_fused(m: int, n: int, k: int, device: torch.device) -> None:
    weight = random_weight(n, k, (128, 128), device)
    dtype = NARROW[device.type]
    x, gate_up = torch.randn(m, k, device=device).to(dtype), torch.randn(m, 2 * k, device=device).to(dtype)
    residual = torch.randn(m, n, device=device).to(dtype)

    class Norm:
        weight = torch.randn(k, device=device).to(dtype)
        eps = 1e-5
        is_rms = True

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return elementwise.rms_norm(x, self.weight, self.eps)

    norm = Norm()
    linear = fp8_linear.Fp8Linear(weight, None, few_rows.Fp8FewRows(), BlockProducts())
    # A single row is not rounded after the norm.
    assert relative_error(linear.apply(x, norm=norm), linear.apply(norm(x))) < (1e-2 if m == 1 else 5e-3)
    apart = linear.apply(elementwise.silu_mul(gate_up), residual=residual.clone())
    assert relative_error(linear.apply(gate_up, gated=True, residual=residual.clone()), apart) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("m", [pytest.param(1, id="tiny-one"), pytest.param(3, id="tiny-few")])
def test_a_norm_that_subtracts_the_mean_precedes_the_product(m: int, device: torch.device) -> None:
    """The kernels that norm their inputs compute an RMS norm."""
    dtype = NARROW[device.type]
    norm = LayerNorm(torch.rand(256, device=device).to(dtype) + 0.5, 1e-5)
    x = torch.randn(m, 256, device=device).to(dtype) + 1
    linear = fp8_linear.Fp8Linear(
        random_weight(24, 256, (128, 128), device), None, few_rows.Fp8FewRows(), BlockProducts()
    )
    assert torch.equal(linear.apply(x, norm=norm), linear.apply(norm(x)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "k", "asked"),
    [
        pytest.param(66, 512, [], id="tiny-few"),
        pytest.param(66, 272, [68], id="tiny-odd"),
        pytest.param(130, 272, [256], id="tiny-next"),
        pytest.param(8450, 512, [8452], id="beyond"),
    ],
)
def test_the_library_multiplies_more_tiles_with_padded_rows(
    m: int, k: int, asked: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []

    def product(
        self: object, x: torch.Tensor, x_scale: torch.Tensor, residual: None, rows: int, dtype: torch.dtype
    ) -> torch.Tensor:
        got.append(len(x))
        return x.new_zeros(rows, 136, dtype=dtype)

    monkeypatch.setattr(fp8_linear.LibraryFp8, "fits", lambda weight: True)
    monkeypatch.setattr(fp8_linear.LibraryFp8, "__call__", product)
    weight = random_weight(136, k, (128, 128), device)
    x = random_inputs(m, k, device).to(NARROW[device.type])
    out = fp8_linear.Fp8Linear(weight, None, few_rows.Fp8FewRows(), BlockProducts()).apply(x)
    assert got == asked
    assert len(out) == m
    assert asked or relative_error(out, exact_product(x, weight)) < 5e-3


def test_rows_that_do_not_begin_at_16_bytes_are_refused() -> None:
    weight = random_weight(32, 24, (128, 128), torch.device("cpu"))
    assert not fp8_linear.Fp8Linear.fits(weight)
    with pytest.raises(ValueError, match=r"an FP8 weight \[32, 24\] has no kernel"):
        fp8_linear.Fp8Linear(weight, None, few_rows.Fp8FewRows(), BlockProducts())
    wide = random_weight(32, 256, (128, 128), torch.device("cpu"))
    cut = Fp8Weight(wide.weight[:, :128], wide.scale[:, :1], (128, 128), "group")
    assert not fp8_linear.Fp8Linear.fits(cut)


@pytest.mark.parametrize(("capability", "there"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_fp8_is_available_from_ada_on(
    capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = capability
    properties = SimpleNamespace(
        multi_processor_count=8, major=major, minor=minor, shared_memory_per_multiprocessor=2**17
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert launch_for.__wrapped__(torch.device("cuda", 0)).fp8 is there
    assert not launch_for(torch.device("cpu")).fp8
