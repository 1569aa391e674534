"""Time all layers of a dense model as one persistent kernel, for one row in bfloat16, against the engine's kernels.

    python -m bench.persistent_step --out persistent.jsonl [--context 384 1024]

One program a processor runs all layers. A barrier over all programs separates the five phases of a layer: qkv,
attention, o, gate and up, down. Each program requests its weights of the next phase before it waits, so that the memory
is busy meanwhile. This is an experiment: `KERNELS.md` says what it gains.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, no-untyped-call"

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bench.kernel_step import Model, Step
from bench.kernel_timing import DEVICE, Heads, Report, attempt, brief, floor, graph_time

FIELDS = tl.constexpr(10)  # pointers of a layer: qkv, o, gate_up, down, both norms, norms of heads, keys, values
BARRIERS = tl.constexpr(5)  # of a layer
PARTIAL = tl.constexpr(4)  # numbers before the values of a part of attention: the maximum, the sum, and two unused
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _barrier(counter_ptr, target, PLAIN: tl.constexpr):
    """Wait until all programs are here. Stores before it are visible after it. target: the counter's value then."""
    if not PLAIN:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b32 t, v;
            mov.u32 t, %tid.x;
            setp.ne.u32 p, t, 0;
            @p bra DONE;
            red.release.gpu.global.add.u32 [$1], 1;
            AGAIN:
            ld.acquire.gpu.global.u32 v, [$1];
            sub.s32 v, v, $2;
            setp.lt.s32 p, v, 0;
            @p bra AGAIN;
            DONE:
            mov.b32 $0, 0;
            }""", "=r,l,r", [counter_ptr.to(tl.int64), target], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _field(table_ptr, layer, nth: tl.constexpr):
    return tl.multiple_of(tl.load(table_ptr + layer * FIELDS + nth).to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def _request(w_ptr, first, R: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, KT: tl.constexpr):
    """Load rows first, ..., first + R - 1 of [n, K], as tiles of ROWS rows and KT columns, row by row."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, KT)
    tiles = ()
    for block in tl.static_range(R // ROWS):
        for at in tl.static_range(K // KT):
            place = (block * ROWS + row)[:, None] * K + (at * KT + column)[None, :]
            tiles = tiles + (tl.load(w_ptr + place),)  # noqa: RUF005
    return tiles


@triton.jit
def _product(tiles, x, block: tl.constexpr, TILES: tl.constexpr):
    """Multiply a block of rows, of TILES tiles each, by x: [ROWS] in float32."""
    sums = tiles[block * TILES].to(tl.float32) * x[0]
    for at in tl.static_range(1, TILES):
        sums += tiles[block * TILES + at].to(tl.float32) * x[at]
    return tl.sum(sums, axis=1)


@triton.jit
def _read(x_ptr, ROWS: tl.constexpr, K: tl.constexpr, KT: tl.constexpr):
    """Load [K] as float32 tiles [ROWS, KT] with equal rows. So each warp has what its rows of weights need."""
    rows, column = tl.zeros([ROWS, 1], tl.int32), tl.arange(0, KT)[None, :]
    x = ()
    for at in tl.static_range(K // KT):
        x = x + (tl.load(x_ptr + rows + (at * KT + column)).to(tl.float32),)  # noqa: RUF005
    return x


@triton.jit
def _normed(x, weight, eps, K: tl.constexpr, TILES: tl.constexpr):
    """Return x / its root mean square * weight. All are tiles with equal rows."""
    squares = x[0] * x[0]
    for at in tl.static_range(1, TILES):
        squares += x[at] * x[at]
    scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    out = ()
    for at in tl.static_range(TILES):
        out = out + ((x[at] * scale).to(tl.bfloat16).to(tl.float32) * weight[at],)  # noqa: RUF005
    return out


@triton.jit
def _head(ptr, weight_ptr, cos, sin, eps, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Return both halves [BLOCK, DIM / 2] of a head of queries or keys, normed and rotated. All rows are equal."""
    column = tl.zeros([BLOCK, 1], tl.int32) + tl.arange(0, DIM // 2)[None, :]
    low, high = tl.load(ptr + column).to(tl.float32), tl.load(ptr + DIM // 2 + column).to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / DIM + eps)[:, None]
    low = low * scale * tl.load(weight_ptr + column).to(tl.float32)
    high = high * scale * tl.load(weight_ptr + DIM // 2 + column).to(tl.float32)
    return (low * cos - high * sin).to(tl.bfloat16), (high * cos + low * sin).to(tl.bfloat16)


@triton.jit
def _keys(k_ptr, v_ptr, pages_ptr, kv_head, start, end, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
          DIM: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Load halves [BLOCK, DIM / 2] of keys, then of values. Those from `end` on are zeros."""
    token = start + tl.arange(0, BLOCK)
    inside = token < end
    page = tl.load(pages_ptr + token // PAGE, mask=inside, other=0)
    place = (((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * DIM)[:, None] + tl.arange(0, DIM // 2)[None, :]
    inside = inside[:, None]
    return (
        tl.load(k_ptr + place, mask=inside, other=0.0), tl.load(k_ptr + DIM // 2 + place, mask=inside, other=0.0),
        tl.load(v_ptr + place, mask=inside, other=0.0), tl.load(v_ptr + DIM // 2 + place, mask=inside, other=0.0),
    )  # fmt: skip


@triton.jit
def _attend(state, low, high, block, inside, scale):
    """Add a block of keys and values to the state of a query: the maximum, the sum, and both halves of the values."""
    most, total, left, right = state
    score = tl.sum(block[0].to(tl.float32) * low + block[1].to(tl.float32) * high, axis=1)
    score = tl.where(inside, score * scale, LOWEST)
    new = tl.maximum(most, tl.max(score, axis=0))
    p = tl.where(inside, tl.exp(score - new), 0.0)
    fade = tl.exp(most - new)
    left = left * fade + tl.sum(p[:, None] * block[2].to(tl.float32), axis=0)
    right = right * fade + tl.sum(p[:, None] * block[3].to(tl.float32), axis=0)
    return new, total * fade + tl.sum(p, axis=0), left, right


@triton.jit
def _attention(qkv_ptr, parts_ptr, pages_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos, sin, position, slot, unit,
               ready, eps, scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
               SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute one part of a KV head's attention. The last part has the new token, whose key and value it stores.

    ready: the part's first block of keys and values, without the new token.
    """
    kv_head, split = unit // SPLITS, unit % SPLITS
    start, end = _part_of(position, split, SPLITS, BLOCK)
    token, half = tl.arange(0, BLOCK), tl.arange(0, DIM // 2)
    key = qkv_ptr + (HEADS + kv_head) * DIM
    new_low, new_high = _head(key, k_norm_ptr, cos, sin, eps, BLOCK, DIM)
    column = tl.zeros([BLOCK, 1], tl.int32) + half[None, :]
    value_low = tl.load(key + KV_HEADS * DIM + column)
    value_high = tl.load(key + KV_HEADS * DIM + DIM // 2 + column)
    place = (slot.to(tl.int32) * KV_HEADS + kv_head) * DIM + column
    stores = (token < tl.where(split == SPLITS - 1, 1, 0))[:, None]  # all rows are equal
    tl.store(k_ptr + place, new_low, mask=stores)
    tl.store(k_ptr + DIM // 2 + place, new_high, mask=stores)
    tl.store(v_ptr + place, value_low, mask=stores)
    tl.store(v_ptr + DIM // 2 + place, value_high, mask=stores)
    # The last part's first block has the new token in its last place.
    last = split == SPLITS - 1
    lead = tl.where(last, BLOCK - 1, BLOCK)
    is_new = token >= tl.where(last, BLOCK - 1, BLOCK)
    inside = (token < tl.minimum(lead, end - start)) | is_new
    first = (
        tl.where(is_new[:, None], new_low, ready[0]), tl.where(is_new[:, None], new_high, ready[1]),
        tl.where(is_new[:, None], value_low, ready[2]), tl.where(is_new[:, None], value_high, ready[3]),
    )  # fmt: skip
    for g in tl.static_range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + g
        low, high = _head(qkv_ptr + head * DIM, q_norm_ptr, cos, sin, eps, BLOCK, DIM)
        low, high = low.to(tl.float32), high.to(tl.float32)
        zero = tl.zeros([DIM // 2], tl.float32)
        state = (tl.full([], LOWEST, tl.float32), tl.zeros([], tl.float32), zero, zero)
        state = _attend(state, low, high, first, inside, scale)
        for begin in tl.range(start + lead, end, BLOCK):
            block = _keys(k_ptr, v_ptr, pages_ptr, kv_head, begin, end, BLOCK, KV_HEADS, DIM, PAGE)
            state = _attend(state, low, high, block, begin + token < end, scale)
        part = parts_ptr + (head * SPLITS + split) * (DIM + PARTIAL)
        tl.store(part, state[0])
        tl.store(part + 1, state[1])
        tl.store(part + PARTIAL + half, state[2])
        tl.store(part + PARTIAL + DIM // 2 + half, state[3])


@triton.jit
def _part_of(position, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first token of a part, and the token after its last. Parts are whole blocks of the earlier tokens."""
    each = tl.cdiv(tl.cdiv(position, BLOCK), SPLITS) * BLOCK
    return split * each, tl.minimum((split + 1) * each, position)


@triton.jit
def _mixed(parts_ptr, at: tl.constexpr, KT: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Add up the parts of attention for columns at * KT, ...: [KT] in float32."""
    STRIDE: tl.constexpr = DIM + PARTIAL
    head, dim = at * (KT // DIM) + tl.arange(0, KT // DIM), tl.arange(0, DIM)
    part = parts_ptr + head * (SPLITS * STRIDE)
    most = tl.load(part, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        most = tl.maximum(most, tl.load(part + split * STRIDE, cache_modifier=".cg"))
    total, values = tl.zeros([KT // DIM], tl.float32), tl.zeros([KT // DIM, DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        one = part + split * STRIDE
        weight = tl.exp(tl.load(one, cache_modifier=".cg") - most)
        total += weight * tl.load(one + 1, cache_modifier=".cg")
        values += weight[:, None] * tl.load(one[:, None] + PARTIAL + dim[None, :], cache_modifier=".cg")
    return tl.reshape(values / total[:, None], [KT]).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _persistent_kernel(
    x_ptr,  # [HIDDEN]: the input; at the end the output
    table_ptr,  # [LAYERS, FIELDS] int64
    cos_sin_ptr,  # [positions, DIM] float32: cosines, then sines
    pages_ptr,  # [pages] int32
    position_ptr,  # [1] int64: of the new token
    slot_ptr,  # [1] int64
    qkv_ptr,  # [(HEADS + 2 * KV_HEADS) * DIM]
    parts_ptr,  # [HEADS, SPLITS, DIM + PARTIAL] float32
    middle_ptr,  # [HIDDEN]
    inner_ptr,  # [INTER]
    counter_ptr,  # [1] int32: how many arrivals there were so far
    eps,
    scale,
    LAYERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile; warps
    KT: tl.constexpr,  # columns of a tile: what a warp loads at once
    OT: tl.constexpr,  # the same for o
    SPLITS: tl.constexpr,  # parts of each KV head
    BLOCK: tl.constexpr,  # tokens of a block of attention
    PLAIN: tl.constexpr,  # one program, without barriers
):
    program = tl.program_id(0)
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    WIDE: tl.constexpr = HEADS * DIM
    UNITS: tl.constexpr = (KV_HEADS * SPLITS + PROGRAMS - 1) // PROGRAMS
    # No program can be a whole launch ahead, so all begin from the same number.
    ALL: tl.constexpr = PROGRAMS * LAYERS * BARRIERS
    target = tl.load(counter_ptr) // ALL * ALL
    position, slot = tl.load(position_ptr).to(tl.int32), tl.load(slot_ptr)
    angle = position * DIM + tl.zeros([BLOCK, 1], tl.int32) + tl.arange(0, DIM // 2)[None, :]
    cos, sin = tl.load(cos_sin_ptr + angle), tl.load(cos_sin_ptr + DIM // 2 + angle)
    r_qkv: tl.constexpr = QKV // PROGRAMS
    r_out: tl.constexpr = HIDDEN // PROGRAMS
    r_inner: tl.constexpr = INTER // PROGRAMS
    TILES: tl.constexpr = HIDDEN // KT
    row = tl.arange(0, ROWS)
    out_rows = program * r_out + row
    weights = _request(_field(table_ptr, 0, 0), program * r_qkv, r_qkv, ROWS, HIDDEN, KT)
    for layer in tl.range(0, LAYERS, num_stages=1):
        # 1: queries, keys and values.
        norm = _read(_field(table_ptr, layer, 4), ROWS, HIDDEN, KT)
        x = _normed(_read(x_ptr, ROWS, HIDDEN, KT), norm, eps, HIDDEN, TILES)
        for block in tl.static_range(r_qkv // ROWS):
            sums = _product(weights, x, block, TILES)
            tl.store(qkv_ptr + program * r_qkv + block * ROWS + row, sums.to(tl.bfloat16))
        k_ptr, v_ptr = _field(table_ptr, layer, 8), _field(table_ptr, layer, 9)
        blocks = ()
        for nth in tl.static_range(UNITS):
            unit = tl.minimum(program + nth * PROGRAMS, KV_HEADS * SPLITS - 1)
            start, end = _part_of(position, unit % SPLITS, SPLITS, BLOCK)
            one = _keys(k_ptr, v_ptr, pages_ptr, unit // SPLITS, start, end, BLOCK, KV_HEADS, DIM, PAGE)
            blocks = blocks + (one,)  # noqa: RUF005
        out = _request(_field(table_ptr, layer, 1), program * r_out, r_out, ROWS, WIDE, OT)
        target += PROGRAMS
        _barrier(counter_ptr, target, PLAIN)
        # 2: attention.
        for nth in tl.static_range(UNITS):
            unit = program + nth * PROGRAMS
            if unit < KV_HEADS * SPLITS:
                _attention(
                    qkv_ptr, parts_ptr, pages_ptr, k_ptr, v_ptr, _field(table_ptr, layer, 6),
                    _field(table_ptr, layer, 7), cos, sin, position, slot, unit, blocks[nth], eps, scale, HEADS,
                    KV_HEADS, DIM, PAGE, SPLITS, BLOCK,
                )  # fmt: skip
        gate = _request(_field(table_ptr, layer, 2), program * r_inner, r_inner, ROWS, HIDDEN, KT)
        up = _request(_field(table_ptr, layer, 2), INTER + program * r_inner, r_inner, ROWS, HIDDEN, KT)
        target += PROGRAMS
        _barrier(counter_ptr, target, PLAIN)
        # 3: its projection.
        mixed = ()
        for at in tl.static_range(WIDE // OT):
            mixed = mixed + (_mixed(parts_ptr, at, OT, DIM, SPLITS)[None, :],)  # noqa: RUF005
        for block in tl.static_range(r_out // ROWS):
            sums = _product(out, mixed, block, WIDE // OT)
            sums += tl.load(x_ptr + block * ROWS + out_rows).to(tl.float32)
            tl.store(middle_ptr + block * ROWS + out_rows, sums.to(tl.bfloat16))
        down = _request(_field(table_ptr, layer, 3), program * r_out, r_out, ROWS, INTER, KT)
        target += PROGRAMS
        _barrier(counter_ptr, target, PLAIN)
        # 4: gate and up.
        norm = _read(_field(table_ptr, layer, 5), ROWS, HIDDEN, KT)
        x = _normed(_read(middle_ptr, ROWS, HIDDEN, KT), norm, eps, HIDDEN, TILES)
        for block in tl.static_range(r_inner // ROWS):
            gates, ups = _product(gate, x, block, TILES), _product(up, x, block, TILES)
            inner = (gates / (1 + tl.exp(-gates)) * ups).to(tl.bfloat16)
            tl.store(inner_ptr + program * r_inner + block * ROWS + row, inner)
        following = tl.minimum(layer + 1, LAYERS - 1)
        weights = _request(_field(table_ptr, following, 0), program * r_qkv, r_qkv, ROWS, HIDDEN, KT)
        target += PROGRAMS
        _barrier(counter_ptr, target, PLAIN)
        # 5: down.
        x = _read(inner_ptr, ROWS, INTER, KT)
        for block in tl.static_range(r_out // ROWS):
            sums = _product(down, x, block, INTER // KT)
            sums += tl.load(middle_ptr + block * ROWS + out_rows).to(tl.float32)
            tl.store(x_ptr + block * ROWS + out_rows, sums.to(tl.bfloat16))
        target += PROGRAMS
        _barrier(counter_ptr, target, PLAIN)


@dataclass(frozen=True)
class Shape:
    layers: int = 28
    hidden: int = 1024
    inter: int = 3072
    heads: Heads = field(default_factory=lambda: Heads(16, 8, 128))

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """[n, k] of qkv, o, gate_up and down."""
        heads = self.heads
        wide = heads.heads * heads.dim
        qkv = wide + 2 * heads.kv_heads * heads.dim
        return (qkv, self.hidden), (self.hidden, wide), (2 * self.inter, self.hidden), (self.hidden, self.inter)

    def bytes(self, context: int) -> int:
        pages = 2 * context * self.heads.kv_heads * self.heads.dim
        return 2 * self.layers * (sum(n * k for n, k in self.linears) + pages)


@dataclass(frozen=True)
class Cut:
    """How a layer is divided."""

    programs: int = 128
    warps: int = 8
    splits: int = 8
    block: int = 64
    tile: int = 256  # columns, which divide all k
    wide_tile: int = 1024  # the same for o


class Layers:
    """Random layers with their pages, and what the kernel writes."""

    def __init__(self, shape: Shape, context: int, device: torch.device, page: int = 16) -> None:
        self.shape, self.page, heads = shape, page, shape.heads

        def random(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, device=device).mul_(scale).bfloat16()

        pages = -(-context // page)
        self.pages = (torch.randperm(pages, device=device) + 1).int()
        pool = (pages + 1, page, heads.kv_heads, heads.dim)
        self.weights = [
            [
                *(random(n, k, scale=0.5 * k**-0.5) for n, k in shape.linears),
                random(shape.hidden), random(shape.hidden), random(heads.dim), random(heads.dim), random(*pool),
                random(*pool),
            ]
            for _ in range(shape.layers)
        ]  # fmt: skip
        addresses = [[tensor.data_ptr() for tensor in layer] for layer in self.weights]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.cos_sin = torch.randn(context, heads.dim, device=device)
        self.position = torch.tensor([context - 1], device=device)
        self.slot = self.pages[(context - 1) // page].long().mul(page).add((context - 1) % page).view(1)
        self.qkv = random(shape.linears[0][0])
        self.middle, self.inner = random(shape.hidden), random(shape.inter)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def launch(self, x: Tensor, cut: Cut, plain: bool = False) -> None:
        """Replace x by the output of the layers."""
        shape, heads, programs = self.shape, self.shape.heads, cut.programs
        sizes = self.qkv.numel(), shape.hidden, shape.inter
        if any(size % (programs * cut.warps) for size in sizes) or any(k % cut.tile for _, k in shape.linears):
            raise ValueError(f"{programs} programs of {cut.warps} rows, and tiles of {cut.tile}, do not divide {sizes}")
        parts = x.new_empty(heads.heads, cut.splits, heads.dim + PARTIAL.value, dtype=torch.float32)
        _persistent_kernel[(programs,)](
            x, self.table, self.cos_sin, self.pages, self.position, self.slot, self.qkv, parts, self.middle, self.inner,
            self.counter, 1e-6, heads.dim**-0.5, LAYERS=shape.layers, HIDDEN=shape.hidden, INTER=shape.inter,
            HEADS=heads.heads, KV_HEADS=heads.kv_heads, DIM=heads.dim, PAGE=self.page, PROGRAMS=programs,
            ROWS=cut.warps, KT=cut.tile, OT=cut.wide_tile, SPLITS=cut.splits, BLOCK=cut.block, PLAIN=plain,
            num_warps=cut.warps,
        )  # fmt: skip

    def reference(self, x: Tensor) -> Tensor:
        """Return the output in float32. It stores the new keys and values, too."""
        heads, context = self.shape.heads, int(self.position) + 1
        cos, sin = self.cos_sin[context - 1].view(2, -1)

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], weight.float(), 1e-6)

        def rotate(x: Tensor) -> Tensor:
            low, high = x.chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        y = x.float()
        for qkv, o, gate_up, down, norm1, norm2, q_norm, k_norm, k_pool, v_pool in self.weights:
            new = (qkv.float() @ norm(y, norm1)).view(-1, heads.dim)
            q, k, v = new.split((heads.heads, heads.kv_heads, heads.kv_heads))
            q, k = rotate(norm(q, q_norm)), rotate(norm(k, k_norm))
            for pool, one in ((k_pool, k), (v_pool, v)):
                pool.view(-1, heads.kv_heads, heads.dim)[self.slot] = one.to(pool.dtype)
            keys, values = (
                pool[self.pages.long()].flatten(0, 1)[:context].float().transpose(0, 1) for pool in (k_pool, v_pool)
            )
            q = q.view(heads.kv_heads, -1, heads.dim)
            mixed = F.scaled_dot_product_attention(q, keys, values)
            y = y + o.float() @ mixed.flatten()
            gate, up = (gate_up.float() @ norm(y, norm2)).chunk(2)
            y = y + down.float() @ (F.silu(gate) * up)
        return y


CUTS = [Cut(128, *cut) for cut in itertools.product((8, 4), (4, 8, 16), (32, 64))]
MOST = 0.1  # the error of 28 layers with sums in bfloat16, of their length


def bench(report: Report, context: int) -> None:
    layers = Layers(Shape(), context, DEVICE)
    x = torch.randn(layers.shape.hidden, device=DEVICE).bfloat16()
    expected, shape, size = layers.reference(x), layers.shape, layers.shape.bytes(context)
    chain = Step(Model(shape.layers, shape.hidden, shape.inter, shape.hidden, shape.heads))  # an output matrix of 2 MB
    us = chain.time(1, context, {})
    del chain
    report.add("persistent", f"0.6B 1x{context}", us, size, variant="chain")
    report.say(f"persistent 0.6B 1x{context:<5} the engine's kernels    floor {floor(size):4.0f} {us:7.1f} us")
    for cut in CUTS:
        for us, _ in attempt(lambda: timed(layers, x, expected, cut), cut):
            report.add("persistent", f"0.6B 1x{context}", us, size, variant=brief(cut))
            report.say(f"persistent 0.6B 1x{context:<5} {brief(cut):22} floor {floor(size):4.0f} {us:7.1f} us")


def timed(layers: Layers, x: Tensor, expected: Tensor, cut: Cut) -> float:
    """Return microseconds of all layers. Raises `ValueError` if their output is wrong."""
    out = x.clone()
    layers.launch(out, cut)
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < MOST:
        raise ValueError(f"the output is wrong: {error:.3f}")
    return graph_time([lambda: layers.launch(out, cut)] * 4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--context", type=int, nargs="+", default=[384, 1024])
    options = parser.parse_args(arguments)
    with options.out.open("w") as out:
        for context in options.context:
            bench(Report(out), context)


if __name__ == "__main__":
    main()
