"""All-reduces of mixed sizes and kinds with data that change with every call, checked on the GPUs that made them."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import random
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.elementwise import TritonNorm
from bench.ranks import Ranks

HIDDEN = 4096
BLOCK = 2048


@triton.jit
def _value(offsets, step, salt, rank):
    """Return whole numbers in -16 ... 15. Eight such numbers add up exactly in bfloat16."""
    mixed = offsets.to(tl.uint32) * 2654435761 + step.to(tl.uint32) * 2246822519 + salt * 3266489917 + rank * 668265263
    mixed = (mixed ^ (mixed >> 15)) * 2654435769
    return ((mixed >> 20) & 31).to(tl.int32) - 16


@triton.jit(do_not_specialize=["salt", "rank", "size"])
def _fill_kernel(out_ptr, step_ptr, salt, rank, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = _value(offsets, tl.load(step_ptr), salt.to(tl.uint32), rank.to(tl.uint32))
    tl.store(out_ptr + offsets, value.to(tl.float32).to(out_ptr.dtype.element_ty), mask=offsets < size)


@triton.jit(do_not_specialize=["salt", "first", "size", "row", "whole"])
def _check_kernel(x_ptr, step_ptr, wrong_ptr, salt, first, size, row, whole, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Compares a sum of COUNT ranks' values, from `first` on; of a gather, `row` columns of the rank `first`."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(step_ptr)
    expected = tl.zeros([BLOCK], tl.int32)
    for rank in tl.static_range(0, COUNT):
        expected += _value(offsets, step, salt.to(tl.uint32), (first + rank).to(tl.uint32))
    at = (offsets // row) * whole + (offsets % row) + tl.where(row == whole, 0, first * row)
    got = tl.load(x_ptr + at, mask=offsets < size, other=0.0).to(tl.float32)
    wrong = (got != expected.to(tl.float32)) & (offsets < size)
    tl.atomic_add(wrong_ptr, tl.sum(wrong.to(tl.int32), axis=0).to(tl.int64))


class Stress:
    """One rank's inputs and its results."""

    def __init__(self, ranks: Ranks, rank: int, most: int) -> None:
        device = ranks.devices[rank]
        self.rank, self.count = rank, len(ranks.devices)
        self.collective = ranks.collectives[rank]
        self.part = torch.empty(most, dtype=torch.bfloat16, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=device)  # elements
        self.norm = TritonNorm(torch.ones(HIDDEN, dtype=torch.bfloat16, device=device), 1e-6)

    def call(self, kind: str, rows: int, salt: int) -> None:
        part = self.part[: rows * HIDDEN].view(rows, HIDDEN)
        self._fill(part, salt, self.rank)
        if kind == "gather":
            out = self.collective.gather(part, self.count * HIDDEN)
            for source in range(self.count):
                self._check(out, salt, source, part.numel(), HIDDEN, self.count * HIDDEN, 1)
        elif kind == "sum":
            out = self.collective.sum(part)
            self._check(out, salt, 0, part.numel(), HIDDEN, HIDDEN, self.count)
        else:  # the residual adds like the part of one more rank
            residual = torch.empty_like(part)
            self._fill(residual, salt, self.count)
            if kind == "residual":
                out = self.collective.sum(part, residual)
            elif kind == "begun":
                out, normed = residual, torch.empty_like(residual)
                pieces = [piece for piece in (slice(0, rows // 2), slice(rows // 2, rows)) if piece.start < piece.stop]
                begun = [self.collective.begin_sum(part[piece], out[piece]) for piece in pieces]
                for piece, one in zip(pieces, begun):
                    one.finish(out[piece], self.norm, normed[piece])
            else:
                out, _ = self.collective.sum_and_norm(part, residual, self.norm)
            self._check(out, salt, 0, part.numel(), HIDDEN, HIDDEN, self.count + 1)

    def begin(self) -> None:
        """As a step does, after which sums may be begun."""
        self.collective.begin_step(rehearsal=True, halves=True)
        self.call("sum", 1, 1 << 18)

    def _fill(self, out: Tensor, salt: int, rank: int) -> None:
        _fill_kernel[(triton.cdiv(out.numel(), BLOCK),)](out, self.step, salt, rank, out.numel(), BLOCK=BLOCK)

    def _check(self, x: Tensor, salt: int, first: int, size: int, row: int, whole: int, count: int) -> None:
        _check_kernel[(triton.cdiv(size, BLOCK),)](
            x, self.step, self.wrong, salt, first, size, row, whole, COUNT=count, BLOCK=BLOCK
        )


def stress(ranks: Ranks, sums: int, calls: int = 400, seed: int = 0) -> dict[str, float]:
    """Graphs of `calls` calls, eager calls of other sizes between them, and hosts that launch some ranks late."""
    draw = random.Random(seed)
    sides = [Stress(ranks, rank, 2048 * HIDDEN) for rank in range(len(ranks.devices))]
    kinds = ("sum", "residual", "norm", "gather", "begun")
    small = [(draw.choice(kinds), draw.choice((1, 2, 3, 5, 8, 16, 32, 64)), i) for i in range(calls)]
    large = [(kind, rows, 1 << 16) for kind in kinds for rows in (100, 256, 700, 1024, 2048)]
    for position, call in zip(draw.sample(range(calls), len(large) // 2), draw.sample(large, len(large) // 2)):
        small[position] = call
    eager = [(draw.choice(kinds), draw.choice((1, 4, 7, 48, 96, 300)), (1 << 17) + i) for i in range(64)]

    def one(rank: int, call: tuple[str, int, int]) -> None:
        sides[rank].call(*call)

    shapes = {(kind, rows): (kind, rows, salt) for kind, rows, salt in [*large, *small, *eager]}
    ranks.rehearse(lambda rank: [one(rank, call) for call in shapes.values()])

    def captured(rank: int, i: int) -> None:
        if i == 0:
            sides[rank].step.add_(1)
            sides[rank].begin()
        one(rank, small[i])

    graphs = ranks.capture(captured, calls)
    for side in sides:
        side.wrong.zero_()
    ranks.wait()
    made, started = 0, time.perf_counter()
    while made < sums:
        order = draw.sample(range(len(sides)), len(sides))
        extra = draw.sample(eager, draw.choice((0, 0, 0, 1, 3)))
        for rank in order:
            with torch.cuda.device(ranks.devices[rank]), torch.cuda.stream(ranks.streams[rank]):
                graphs[rank].replay()
                if extra:
                    sides[rank].begin()
                for call in extra:
                    one(rank, call)
            if draw.random() < 0.1:
                busy = time.perf_counter() + draw.choice((20e-6, 200e-6, 2e-3))
                while time.perf_counter() < busy:
                    pass
        made += calls + len(extra)
    ranks.wait()
    seconds = time.perf_counter() - started
    wrong = sum(int(side.wrong.item()) for side in sides)
    return {"made": made, "wrong_elements": wrong, "seconds": seconds, "failed": float(ranks.failed())}
