"""The candidate for tiles of MXFP4 experts: its kernels in the interpreter, and its assembly on 32 simulated lanes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.weighted_sum import weighted_sum
from aengine.kernels.linear.int4.packed_codes import pack_codes
from aengine.kernels.linear.weights.e2m1 import Mxfp4Weight
from bench.packed_candidates import StreamedConfig, StreamedCut, streamed_tiles
from bench.packed_strips import strip_product
from bench.packed_tiles import dequantised
from tests.kernels.conftest import relative_error, tolerance
from tests.kernels.experts.test_triton_experts import reference, rule_of, spread

CONFIGS = {
    "one-eight": StreamedConfig(1, StreamedCut(1, 2), StreamedCut(2, 2)),
    "two-eights": StreamedConfig(2, StreamedCut(2, 1, 2), StreamedCut(1, 1, 2)),
}


def mxfp4(*shape: int) -> Mxfp4Weight:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    return Mxfp4Weight.from_codes(codes, torch.randint(120, 124, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("how", "config"), [("nowhere", "one-eight"), ("one", "two-eights")])
def test_streamed_tiles_tiny(how: str, config: str, device: torch.device) -> None:
    """Nine tokens are more than eight, and 160 and 32 columns are no whole blocks."""
    shape = tokens, experts, top_k, hidden, inter = 9, 2, 2, 160, 32
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    ids = spread(how, tokens, experts, top_k).to(device)
    gate_up, down = mxfp4(experts, 2 * inter, hidden), mxfp4(experts, hidden, inter)
    packed = PackedMatrices.from_weight(gate_up, parts=2), PackedMatrices.from_weight(down)
    h, residual = (torch.randn(tokens, hidden).div(16).to(dtype).to(device) for _ in range(2))
    weights = torch.rand(tokens, top_k, device=device)
    rule = rule_of("both", shape, dtype, device)
    plan = make_plan(ids, experts, CONFIGS[config].height)
    rows = streamed_tiles(h, plan, top_k, *(to_device(one, device) for one in packed), CONFIGS[config], rule)
    out = weighted_sum(rows, ids, weights, residual.clone(), experts)
    matrices = gate_up.dequantize().to(device), down.dequantize().to(device)
    assert relative_error(out, reference(h, *matrices, ids, weights, residual, rule)) < tolerance(dtype)


def to_device(one: PackedMatrices, device: torch.device) -> PackedMatrices:
    words, scales = one.words.to(device), one.scales.to(device)
    return PackedMatrices(words, scales, one.group, one.e2m1, one.bare, one.rows, one.columns)


def test_the_reference_reads_the_layout() -> None:
    weight = mxfp4(3, 64, 160)
    packed = PackedMatrices.from_weight(weight, parts=2)
    assert torch.equal(dequantised(packed, 1, parts=2), weight.dequantize()[1].float())


@pytest.mark.parametrize("strips", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_the_assembly_multiplies_strips(groups: int, strips: int) -> None:
    weight, tokens = mxfp4(16 * strips, 128), 8 * groups
    packed = pack_codes(weight)
    x = torch.randn(tokens, 128).bfloat16()
    before = torch.randn(16 * strips, tokens)
    r, t = torch.arange(32) // 4, torch.arange(32) % 4
    words = packed.words.view(strips, 2, 32, 8).view(torch.int32)  # strip, half, lane, word
    registers = [words[at // 8, at // 4 % 2, :, at % 4] for at in range(8 * strips)]
    registers += [packed.scales[0, r + 8 * eight] for eight in range(2 * strips)]
    columns = x.view(groups, 8, 4, 2, 2, 4, 2)  # group, token, quarter, half, eight of columns, t, pair
    memory = [
        [columns[group, r, quarter, at // 2, at % 2, t].contiguous().view(torch.int32)[:, 0] for at in range(4)]
        for quarter in range(4) for group in range(groups)
    ]  # fmt: skip
    places = [
        (r + 8 * (i // 2 % 2) + 16 * strip, i // 4 * 8 + 2 * t + i % 2)
        for strip in range(strips) for i in range(4 * groups)
    ]  # fmt: skip
    registers += [torch.zeros(32), *(before[place] for place in places)]  # the address of x, and the sums
    assembly, operands = strip_product(groups, strips)
    assert operands.count(",") + 1 == len(places) + len(registers)
    out = torch.empty(16 * strips, tokens)
    for place, one in zip(places, simulated(assembly, len(places), registers, memory), strict=True):
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
