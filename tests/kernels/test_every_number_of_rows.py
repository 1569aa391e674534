"""Products and experts of real shapes, in every format, at all numbers of rows that may have a config of their own.

Each case runs twice, and once more with a residual.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Linear
from aengine.kernels.linear.fp8.quantize import quantize_fp8
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.e2m1 import Mxfp4Weight, Nvfp4Weight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from aengine.kernels.torch_kernels import TorchKernels
from aengine.kernels.triton_kernels import TritonKernels
from tests.kernels.conftest import relative_error
from tests.kernels.experts.test_triton_experts import spread

pytestmark = pytest.mark.gpu

# The largest errors. Rounding to bf16 alone causes 2.3e-3. Inputs of FP8 products are rounded as well.
FORMATS = {"bf16": 2.8e-3, "fp8": 5e-2, "int4": 3e-3, "mxfp4": 2.8e-3, "nvfp4": 3e-3}
ROWS = [*range(1, 130), *range(130, 513, 7), 1023, 1024, 2048]
GATED_ROWS = [*range(479, 514), 640, 641, 959, 1023, 1024, 1025, 2048, 4095, 8192]
TOKENS = [*range(1, 70), 96, 128, 200, 256, 333, 512, 1000, 2048]


def quantized(form: str, *shape: int, device: torch.device) -> QuantizedWeight:
    """Return a random matrix [..., n, k] whose products are near one."""
    *experts, n, k = shape
    if form == "fp8":
        matrices = torch.randn(math.prod(experts), n, k, device=device) / k**0.5
        parts = [quantize_fp8(matrix) for matrix in matrices]
        values, scale = (torch.stack(each).view(*experts, *each[0].shape) for each in zip(*parts))
        return Fp8Weight(values, scale, (128, 128), "group")
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    if form == "mxfp4":
        return Mxfp4Weight.from_codes(
            codes, torch.randint(119, 122, (*experts, n, k // 32), dtype=torch.uint8, device=device)
        )
    if form == "nvfp4":
        scale = 2.0 ** torch.randint(-4, 5, (*experts, n, k // 16), device=device)
        factor = (torch.rand(*experts, n, 1, device=device) + 0.1) / (16 * k**0.5)
        return Nvfp4Weight.from_codes(codes, scale.to(torch.float8_e4m3fn), factor)
    return Int4Weight(codes, (torch.rand(*experts, n, k // 128, device=device) + 0.1) / (6 * k**0.5))


def linear_of(form: str, n: int, k: int, device: torch.device) -> tuple[Linear, Tensor]:
    """Return a random linear, and its weight [n, k] in float32."""
    kernels = TritonKernels()
    if form == "bf16":
        weight = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
        return kernels.dense(weight, None), weight.float()
    codes = quantized(form, n, k, device=device)
    return kernels.quantized(codes, None, torch.bfloat16), codes.dequantize()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (5120, 2048), (2048, 4096), (1024, 3072)]
)
def test_a_linear_gives_its_product(n: int, k: int, form: str, device: torch.device) -> None:
    linear, exact = linear_of(form, n, k, device)
    wrong: list[tuple[int, float]] = []
    for rows in ROWS:
        x, residual = (torch.randn(rows, width, device=device).bfloat16() for width in (k, n))
        once, again, added = linear.apply(x), linear.apply(x), linear.apply(x, residual=residual.clone())
        product = x.float() @ exact.t()
        error = max(relative_error(once, product), relative_error(added, product + residual.float()))
        if not error < FORMATS[form] or not torch.equal(once, again):
            wrong.append((rows, error))
    assert not wrong


@pytest.mark.parametrize("form", ["bf16", "int4"])
@pytest.mark.parametrize(("n", "k"), [(24576, 4096), (6144, 1024), (37888, 3584)])
def test_gate_and_up_are_activated(n: int, k: int, form: str, device: torch.device) -> None:
    linear, exact = linear_of(form, n, k, device)
    done, wrong = 0, list[tuple[int, float]]()
    for rows in GATED_ROWS:
        x = torch.randn(rows, k, device=device).bfloat16()
        out, again = linear.apply_activated(x), linear.apply_activated(x)
        if out is None or again is None:
            continue
        gate, up = (x.float() @ exact.t()).chunk(2, dim=-1)
        error = relative_error(out, F.silu(gate) * up)
        if not error < 2 * FORMATS[form] or not torch.equal(out, again):
            wrong.append((rows, error))
        done += 1
    assert done or launch_for(device).capability[0] != 9
    assert not wrong


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner", "form"),
    [
        *((128, 8, 2048, 768, form) for form in FORMATS),
        *((8, 2, 1024, 1792, form) for form in FORMATS),
        *((32, 4, 2880, 2880, form) for form in ("bf16", "mxfp4", "nvfp4")),  # no multiple of 128
    ],
)
def test_experts_give_their_sum(
    experts: int, top_k: int, hidden: int, inner: int, form: str, device: torch.device
) -> None:
    kernels = TritonKernels()
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    exact: list[Tensor]
    if form == "bf16":
        made = [(torch.randn(shape, device=device) / shape[-1] ** 0.5).bfloat16() for shape in shapes]
        all_of_them, exact = kernels.experts(*made), [matrices.float() for matrices in made]
    else:
        weights = [quantized(form, *shape, device=device) for shape in shapes]
        all_of_them = kernels.quantized_experts(*weights, torch.bfloat16)
        exact = [weight.dequantize() for weight in weights]
    reference = TorchKernels().experts(*exact)
    wrong: list[tuple[int, float]] = []
    for tokens in TOKENS:
        h, residual = (torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(2))
        ids = spread("even", tokens, experts, top_k).to(device)
        shares = torch.rand(tokens, top_k, device=device).softmax(dim=-1)
        once, again = (all_of_them.add_to(h, ids, shares, residual.clone()) for _ in range(2))
        expected = reference.add_to(h.float(), ids, shares, residual.float())
        error = relative_error(once, expected)
        if not error < 2 * FORMATS[form] or not torch.equal(
            once, again
        ):  # the activations between the products are rounded, too
            wrong.append((tokens, error))
    assert not wrong
