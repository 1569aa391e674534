"""Few rows of MXFP4 experts: the sum against float64, the choice, and the assembly on 32 simulated lanes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.experts.cuts import with_cut

pytest.importorskip("triton")

from aengine.kernels.experts.packed.few_rows import PackedFewConfig
from aengine.kernels.experts.packed.single_rows import PackedSingleConfig
from aengine.kernels.experts.packed.strips import OPERANDS, two_strips
from aengine.kernels.experts.products import packed_experts
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.launch import Launch
from aengine.kernels.linear.int4.packed_codes import pack_codes
from aengine.kernels.linear.weights.e2m1 import E2m1Weight, Mxfp4Weight
from aengine.kernels.linear.weights.integers import Int4Weight
from tests.kernels.experts.packed.test_packed_experts import packed_weight
from tests.kernels.experts.test_triton_experts import GELU, UNGATED, reference, rule_of, spread
from tests.kernels.offline import H200

CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.interpreted(4)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("rule", ["plain", "both", "gelu"])
@pytest.mark.parametrize("how", ["nowhere", "one", "even"])
@pytest.mark.parametrize("column_warps", [1, 4])
@pytest.mark.parametrize(
    "shape",
    [
        # Nine tokens are more than a tile has. 160 and 32 columns are no whole blocks, ten strips no whole programs.
        pytest.param((9, 2, 2, 160, 32), id="tiny"),
        pytest.param((128, 128, 4, 2880, 2880), id="a-model's"),
        pytest.param((64, 32, 4, 2880, 736), id="a-quarter's"),
    ],
)
def test_the_weighted_sum(shape: tuple[int, ...], column_warps: int, how: str, rule: str, device: torch.device) -> None:
    tokens, experts, top_k, hidden, inter = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    ids = spread(how, tokens, experts, top_k).to(device)
    gate_up, down = (packed_weight(experts, *size, "mxfp4", device) for size in ((2 * inter, hidden), (hidden, inter)))
    h, residual = (torch.randn(tokens, hidden, device=device).div(16).to(dtype) for _ in range(2))
    weights = torch.rand(tokens, top_k, device=device)
    ends = {"plain": SILU, "gelu": GELU}.get(rule) or rule_of(rule, shape, dtype, device)
    layer = with_cut(packed_experts(gate_up, down, ends), PackedFewConfig(column_warps))
    outs = [layer.add_to(h, ids, weights, residual.clone()) for _ in range(2)]
    expected = reference(h, gate_up.dequantize(), down.dequantize(), ids, weights, residual, ends)
    assert relative_error(outs[0], expected) < tolerance(dtype)
    assert torch.equal(*outs)


@pytest.mark.gpu
def test_small_rows_are_exact_too(device: torch.device) -> None:
    """Products of codes without 2 ** 126 must not end in the least steps of float32."""
    gate_up, down = (packed_weight(4, *size, "mxfp4", device) for size in ((256, 128), (128, 128)))
    h = torch.randn(8, 128, device=device).mul(2.0**-20).bfloat16()
    ids, weights = spread("even", 8, 4, 2).to(device), torch.ones(8, 2, device=device)
    out = with_cut(packed_experts(gate_up, down), PackedFewConfig(1)).add_to(h, ids, weights, None)
    expected = reference(h, gate_up.dequantize(), down.dequantize(), ids, weights, torch.zeros_like(h))
    assert relative_error(out, expected) < tolerance(h.dtype)


def chosen(
    weight: Int4Weight | E2m1Weight,
    tokens: int,
    rule: ExpertRule = SILU,
    dtype: torch.dtype = torch.bfloat16,
    launch: Launch = H200,
) -> object:
    products = packed_experts(weight, packed_weight(32, 128, 64, "mxfp4", CPU), rule).products
    single = products.single_config(tokens, 4, dtype, launch)
    return products.tile_config(tokens, 4, dtype, launch) if single is None else single


def test_they_are_chosen_for_up_to_four_rows_an_expert() -> None:
    weight = packed_weight(32, 128, 128, "mxfp4", CPU)
    assert isinstance(chosen(weight, 3), PackedSingleConfig)
    assert chosen(weight, 4) == chosen(weight, 16) == PackedFewConfig(4)
    assert chosen(weight, 17) == chosen(weight, 32) == PackedFewConfig(1)
    assert not isinstance(chosen(weight, 33), PackedFewConfig)


def test_what_they_do_not_compute_has_other_kernels() -> None:
    weight = packed_weight(32, 128, 128, "mxfp4", CPU)
    large = Mxfp4Weight.from_codes(
        torch.zeros(32, 128, 128, dtype=torch.uint8), torch.full((32, 128, 4), 129, dtype=torch.uint8)
    )
    others = [
        chosen(large, 16),
        chosen(packed_weight(32, 128, 128, "nvfp4", CPU), 16),
        chosen(packed_weight(32, 128, 128, "int4-128", CPU), 16),
        chosen(packed_weight(32, 64, 128, "mxfp4", CPU), 16, UNGATED),
        chosen(weight, 16, dtype=torch.float16),
        chosen(weight, 16, launch=Launch(148, True, 227 * 1024, capability=(10, 0))),
    ]
    assert not any(isinstance(one, PackedFewConfig) for one in others)


def test_the_assembly_multiplies_two_strips() -> None:
    codes, scale = torch.randint(0, 16, (32, 128)).byte(), torch.randint(120, 124, (32, 4)).byte()
    weight = Mxfp4Weight.from_codes(codes, scale)
    packed, x, before = pack_codes(weight), torch.randn(8, 128).bfloat16(), torch.randn(32, 8)
    r, t = torch.arange(32) // 4, torch.arange(32) % 4
    words = packed.words.view(2, 2, 32, 8).view(torch.int32)  # strip, half, lane, word
    registers = [words[at // 8, at // 4 % 2, :, at % 4] for at in range(16)]
    registers += [packed.scales[0, r + 8 * eight] for eight in range(4)]
    columns = x.view(8, 4, 2, 2, 4, 2)  # token, quarter, half, eight of columns, t, pair
    memory = [
        [columns[r, quarter, at // 2, at % 2, t].contiguous().view(torch.int32)[:, 0] for at in range(4)]
        for quarter in range(4)
    ]
    places = [(r + 8 * (i // 2 % 2) + 16 * (i // 4), 2 * t + i % 2) for i in range(8)]
    registers += [torch.zeros(32), *(before[place] for place in places)]  # the address of x, and the sums
    assert OPERANDS.count(",") + 1 == len(places) + len(registers)
    out = torch.empty(32, 8)
    for place, one in zip(places, simulated(two_strips(), len(places), registers, memory), strict=True):
        out[place] = one.float()
    expected = before.double() + weight.dequantize().double() @ x.double().t()
    assert relative_error(out, expected) < 1e-6


def simulated(assembly: str, outputs: int, inputs: list[Tensor], memory: list[list[Tensor]]) -> list[Tensor]:
    """Run assembly on 32 lanes, [32] each. Numbers are int64 with 32 bits, or float64. memory: four words of each
    piece of 512 bytes.
    """
    named = {
        f"${outputs + i}": one.long() & 0xFFFFFFFF if one.dtype == torch.int32 else one.double()
        for i, one in enumerate(inputs)
    }

    def value(name: str) -> Tensor:
        if name.startswith("0f"):
            return torch.zeros(32, dtype=torch.float64)
        return named[name] if name in named else torch.full((32,), int(name, 0))

    for line in filter(None, (line.strip() for line in re.split("[;\n]", assembly))):
        operation, _, rest = line.partition(" ")
        if line in "{}" or operation == ".reg":
            continue
        if operation.startswith(("mma", "ld")):
            to, *operands = (part.replace(" ", "").split(",") for part in re.findall(r"\{(.*?)\}", line))
            if operation.startswith("ld"):
                loaded = memory[int(rest.split("+")[1].strip(" ]")) // 512]
                named.update(zip(to, (one.long() & 0xFFFFFFFF for one in loaded), strict=True))
            else:
                left, right, start = ([value(name) for name in names] for names in operands)
                named.update(zip(to, product(left, right, start), strict=True))
            continue
        to, *sources = rest.replace(" ", "").split(",")
        a, b, *more = (value(name) for name in sources)
        kind = operation.split(".")[0]
        if kind == "fma":
            scale = b.to(torch.int32).view(torch.float32).double() if b.dtype == torch.int64 else b
            named[to] = a * scale + more[0]
        else:
            results = {"add": a + b, "shl": a << b, "shr": a >> b, "and": a & b}
            named[to] = (a & b | more[0] if kind == "lop3" else results[kind]) & 0xFFFFFFFF
    return [named[f"${i}"] for i in range(outputs)]


def product(left: list[Tensor], right: list[Tensor], start: list[Tensor]) -> list[Tensor]:
    """`mma.m16n8k16` of bfloat16, as its documentation lays the operands out."""
    r, t = torch.arange(32) // 4, torch.arange(32) % 4
    a, b = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
    for i, register in enumerate(left):
        for half in range(2):
            a[r + 8 * (i % 2), 8 * (i // 2) + 2 * t + half] = number(register, half)
    for i, register in enumerate(right):
        for half in range(2):
            b[8 * i + 2 * t + half, r] = number(register, half)
    c = a @ b
    return [start[i] + c[r + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]


def number(register: Tensor, half: int) -> Tensor:
    bits = (register >> 16 * half & 0xFFFF) << 16
    return bits.to(torch.int32).view(torch.float32).double()
