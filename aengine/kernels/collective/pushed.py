"""Sums and gathers of little data: every rank pushes its part into a mailbox that each other rank has for it.

A program of one rank works with the programs of the same id on the others and nobody else, so they need not all run at
once. It pushes some lanes and waits for the others' in its own memory: one way through the link and no more. While it
waits, other programs of its processor keep the link busy.

A mailbox, int32 [2, ranks, PROGRAMS, CAPACITY, 4], has two regions for each source and program, used in turns, and a
program keeps whose turn it is in its own device's memory: graphs replay, and calls of all sizes and kinds follow each
other. Two are enough. Let program p of rank A push for its call n + 2. It has received what p of rank B pushed in
call n + 1, and p of B began that after call n was complete on B (one stream; kernels complete in its order): what A
pushed for call n was taken out of the same region, and the region emptied, before.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.collective.lanes import (
    EMPTY,
    add,
    chosen,
    gave_up,
    load_lanes,
    multiply,
    narrow,
    receive_lanes,
    sealed,
    send_lanes,
    store_lanes,
    total,
    widen,
)
from aengine.kernels.variants import keep_variants


@triton.jit
def region(box, turn, source, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr):
    """The address in a rank's mailbox for what this program of rank `source` pushes."""
    return box + (((turn * COUNT + source) * PROGRAMS + tl.program_id(0)).to(tl.int64)) * (CAPACITY * 16)


@triton.jit
def push(
    words, inside, at, boxes_ptr, rank, turn,
    COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Into every other rank's mailbox; at: int64 [lanes], bytes within the region."""
    for step in tl.static_range(1, COUNT):
        box = tl.load(boxes_ptr + (rank + step) % COUNT)
        send_lanes(region(box, turn, rank, COUNT, PROGRAMS, CAPACITY) + at, words, inside)


@triton.jit
def empty(inside, at, box, rank, turn, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr):
    """Take back what all others pushed there, once every thread of the program has read it."""
    tl.debug_barrier()
    word = tl.full([inside.shape[0]], EMPTY, tl.int32)
    nothing = word, word, word, word
    for step in tl.static_range(1, COUNT):
        store_lanes(region(box, turn, (rank + step) % COUNT, COUNT, PROGRAMS, CAPACITY) + at, nothing, inside)


@keep_variants
@triton.jit(do_not_specialize=["rank", "lanes"])
def pushed_sum_kernel(
    part_ptr,  # [lanes * 16 bytes], which the result replaces
    residual_ptr,  # the same, or None
    weight_ptr,  # [ROW * 16 bytes], or None without a norm
    normed_ptr,  # as part, or None
    boxes_ptr,  # int64 [COUNT]: addresses of the ranks' mailboxes
    turns_ptr,  # int32 [PROGRAMS]
    control_ptr,  # int64 [2]
    rank,
    lanes,
    eps,
    ROW: tl.constexpr,  # lanes a turn of the loop, all of a token's with a norm
    LANES: tl.constexpr,  # the power of two from there on
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, LANES)
    within = lane < ROW
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    elements: tl.constexpr = 128 // dtype.primitive_bitwidth  # of a lane
    if OVERLAP:
        gdc_launch_dependents()
    if weight_ptr is not None:
        weight = widen(load_lanes(weight_ptr.to(tl.int64) + lane * 16, within), dtype)
    if OVERLAP:
        gdc_wait()
    alive = gave_up(control_ptr) == 0
    turn = tl.load(turns_ptr + program)
    own_box = tl.load(boxes_ptr + rank)
    for step in range(tl.cdiv(tl.cdiv(lanes, ROW) - program, programs)):
        place = (program + step * programs) * ROW + lane
        inside = within & (place < lanes)
        start, at = place.to(tl.int64) * 16, (step * ROW + lane).to(tl.int64) * 16
        own = sealed(load_lanes(part_ptr.to(tl.int64) + start, inside))
        push(own, inside & alive, at, boxes_ptr, rank, turn, COUNT, PROGRAMS, CAPACITY)
        if residual_ptr is not None:
            residual = load_lanes(residual_ptr.to(tl.int64) + start, inside)
        for source in tl.static_range(0, COUNT):
            others = inside & alive & (source != rank)
            words = receive_lanes(region(own_box, turn, source, COUNT, PROGRAMS, CAPACITY) + at, others, control_ptr)
            wide = widen(chosen(source == rank, own, words), dtype)
            if source == 0:  # noqa: SIM108 (Triton needs the name on either side)
                x = wide
            else:
                x = add(x, wide)
        empty(inside, at, own_box, rank, turn, COUNT, PROGRAMS, CAPACITY)
        if residual_ptr is not None:
            x = add(x, widen(residual, dtype))
        words = narrow(x, dtype)
        store_lanes(part_ptr.to(tl.int64) + start, words, inside)
        if weight_ptr is not None:
            x = widen(words, dtype)  # as it was rounded: from here on as norms.py does it
            scale = tl.math.rsqrt(tl.sum(total(multiply(x, x)), axis=0) / (ROW * elements) + eps)
            scales = (scale, scale, scale, scale, scale, scale, scale, scale)
            normed = multiply(widen(narrow(multiply(x, scales), dtype), dtype), weight)
            store_lanes(normed_ptr.to(tl.int64) + start, narrow(normed, dtype), inside)
    tl.store(turns_ptr + program, 1 - turn)


@keep_variants
@triton.jit(do_not_specialize=["rank", "lanes", "row"])
def pushed_gather_kernel(
    part_ptr,  # [rows, row * 16 bytes]
    out_ptr,  # [rows, COUNT, row * 16 bytes]
    boxes_ptr,  # int64 [COUNT]: addresses of the ranks' mailboxes
    turns_ptr,  # int32 [PROGRAMS]
    control_ptr,  # int64 [2]
    rank,
    lanes,
    row,
    LANES: tl.constexpr,  # a turn of the loop
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    alive = gave_up(control_ptr) == 0
    turn = tl.load(turns_ptr + program)
    own_box = tl.load(boxes_ptr + rank)
    for step in range(tl.cdiv(tl.cdiv(lanes, LANES) - program, programs)):
        lane = (program + step * programs) * LANES + tl.arange(0, LANES)
        inside = lane < lanes
        at = (step * LANES + tl.arange(0, LANES)).to(tl.int64) * 16
        words = sealed(load_lanes(part_ptr.to(tl.int64) + lane.to(tl.int64) * 16, inside))
        push(words, inside & alive, at, boxes_ptr, rank, turn, COUNT, PROGRAMS, CAPACITY)
        target = (lane // row).to(tl.int64) * (COUNT * row) + lane % row
        store_lanes(out_ptr.to(tl.int64) + (target + rank * row) * 16, words, inside)
        for other in tl.static_range(1, COUNT):
            source = (rank + other) % COUNT
            address = region(own_box, turn, source, COUNT, PROGRAMS, CAPACITY) + at
            words = receive_lanes(address, inside & alive, control_ptr)
            store_lanes(out_ptr.to(tl.int64) + (target + source * row) * 16, words, inside)
        empty(inside, at, own_box, rank, turn, COUNT, PROGRAMS, CAPACITY)
    tl.store(turns_ptr + program, 1 - turn)
