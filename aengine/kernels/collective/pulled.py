"""Sums and gathers of much data: ranks tell each other where their parts lie, and read and write there.

A program works with those of the same id on the other ranks, through the mailboxes of `pushed.py` and in their turns.
It sends its part's address, waits for the others', does its share, makes sure that what it wrote has arrived, says so,
and waits until the others say it: when the kernel is complete, nobody reads or writes this rank's part any more.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.collective.lanes import EMPTY, fence, gave_up, receive_lanes, send_lanes, store_lanes
from aengine.kernels.collective.pushed import region
from aengine.kernels.variants import keep_variants


@triton.jit
def _meet(
    word, second, place, lost, boxes_ptr, own_box, rank, turn, control_ptr,
    THREADS: tl.constexpr, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Send two int64 words to every rank, and wait for everybody's, at so many lanes into their regions.

    Not where something is lost already. Returns whether it is, 0 or 1, or somebody did not come.
    """
    other = tl.arange(0, THREADS)
    inside = (other < COUNT) & (lost == 0)
    zero = tl.zeros([THREADS], tl.int32)
    words = (
        zero + word.to(tl.int32),
        zero + (word >> 32).to(tl.int32),
        zero + second.to(tl.int32),
        zero + (second >> 32).to(tl.int32),
    )
    boxes = tl.load(boxes_ptr + other, mask=inside, other=0)
    send_lanes(region(boxes, turn, rank, COUNT, PROGRAMS, CAPACITY) + place * 16, words, inside)
    came = receive_lanes(region(own_box, turn, other, COUNT, PROGRAMS, CAPACITY) + place * 16, inside, control_ptr)
    lost |= tl.max(((came[0] == EMPTY) | (came[1] == EMPTY)).to(tl.int32), axis=0)
    tl.debug_barrier()
    return lost


@triton.jit
def _leave(
    lost, boxes_ptr, own_box, rank, turn, control_ptr,
    THREADS: tl.constexpr, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks are done, and empty what was sent here."""
    lane = tl.arange(0, THREADS)
    fence(lane)
    tl.debug_barrier()
    done = tl.full([], 0, tl.int64)
    _meet(done, done, 1, lost, boxes_ptr, own_box, rank, turn, control_ptr, THREADS, COUNT, PROGRAMS, CAPACITY)
    word = tl.full([THREADS], EMPTY, tl.int32)
    words = word, word, word, word
    where = region(own_box, turn, lane // 2, COUNT, PROGRAMS, CAPACITY) + (lane % 2) * 16
    store_lanes(where, words, lane < 2 * COUNT)


@keep_variants
@triton.jit(do_not_specialize=["rank"])
def arrived_kernel(
    boxes_ptr,  # int64 [COUNT]: addresses of the ranks' mailboxes
    turns_ptr,  # int32 [PROGRAMS]
    control_ptr,  # int64 [2]
    rank,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    THREADS: tl.constexpr,
):
    """One program: say that what this rank's stream has copied is there, and wait until all others have said so."""
    lane = tl.arange(0, THREADS)
    turn = tl.load(turns_ptr)
    box = tl.load(boxes_ptr + rank)
    fence(lane)
    zero = tl.full([], 0, tl.int64)
    lost = gave_up(control_ptr)
    _meet(zero, zero, 0, lost, boxes_ptr, box, rank, turn, control_ptr, THREADS, COUNT, PROGRAMS, CAPACITY)
    fence(lane)
    word = tl.full([THREADS], EMPTY, tl.int32)
    words = word, word, word, word
    store_lanes(region(box, turn, lane, COUNT, PROGRAMS, CAPACITY), words, lane < COUNT)
    tl.store(turns_ptr, 1 - turn)


@triton.jit
def _sent_address(
    number, source, own_box, turn, like, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """The address that a rank has sent by `_meet`, as its first word or its second."""
    words = region(own_box, turn, source, COUNT, PROGRAMS, CAPACITY).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(tl.load(words + number).to(like.dtype), 16)


@keep_variants
@triton.jit(do_not_specialize=["rank"])
def pulled_sum_kernel(
    part_ptr,  # [size]
    residual_ptr,  # the same, or None
    out_ptr,  # the same; may be part_ptr or residual_ptr
    boxes_ptr,  # int64 [COUNT]: addresses of the ranks' mailboxes
    turns_ptr,  # int32 [PROGRAMS]
    control_ptr,  # int64 [2]
    rank,
    size,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each rank adds up every COUNT-th block, of all parts, and writes it into the results of all ranks."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns_ptr + program)
    box = tl.load(boxes_ptr + rank)
    here, there = part_ptr.to(tl.int64), out_ptr.to(tl.int64)
    lost = gave_up(control_ptr)
    lost = _meet(here, there, 0, lost, boxes_ptr, box, rank, turn, control_ptr, THREADS, COUNT, PROGRAMS, CAPACITY)
    fence(tl.arange(0, THREADS))
    blocks = tl.where(lost == 0, tl.cdiv(size, BLOCK), 0)
    for b in range(program * COUNT + rank, blocks, programs * COUNT):
        offsets = tl.cast(b, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        for source in tl.static_range(0, COUNT):
            part = _sent_address(0, source, box, turn, part_ptr, COUNT, PROGRAMS, CAPACITY)
            wide = tl.load(part + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
            if source == 0:
                total = wide
            else:
                total += wide
        if residual_ptr is not None:
            total += residual.to(tl.float32)
        x = total.to(out_ptr.dtype.element_ty)
        for target in tl.static_range(0, COUNT):
            out = _sent_address(1, target, box, turn, out_ptr, COUNT, PROGRAMS, CAPACITY)
            tl.store(out + offsets, x, mask=inside)
    _leave(lost, boxes_ptr, box, rank, turn, control_ptr, THREADS, COUNT, PROGRAMS, CAPACITY)
    tl.store(turns_ptr + program, 1 - turn)


@keep_variants
@triton.jit(do_not_specialize=["rank", "rows"])
def pulled_gather_kernel(
    part_ptr,  # [rows, row]
    out_ptr,  # [rows, COUNT, row]
    boxes_ptr,  # int64 [COUNT]: addresses of the ranks' mailboxes
    turns_ptr,  # int32 [PROGRAMS]
    control_ptr,  # int64 [2]
    rank,
    rows,
    row,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    THREADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Every rank reads what is not its own, and keeps what it has read."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns_ptr + program)
    box = tl.load(boxes_ptr + rank)
    here = part_ptr.to(tl.int64)
    lost = gave_up(control_ptr)
    lost = _meet(here, here, 0, lost, boxes_ptr, box, rank, turn, control_ptr, THREADS, COUNT, PROGRAMS, CAPACITY)
    fence(tl.arange(0, THREADS))
    pieces = tl.cdiv(row, BLOCK)
    blocks = tl.where(lost == 0, rows * pieces, 0)
    for b in range(program, blocks, programs):
        columns = (b % pieces) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < row
        start = tl.cast(b // pieces, tl.int64) * row
        for step in tl.static_range(0, COUNT):
            source = (rank + step) % COUNT
            part = _sent_address(0, source, box, turn, part_ptr, COUNT, PROGRAMS, CAPACITY)
            piece = tl.load(part + start + columns, mask=inside, cache_modifier=".cg")
            tl.store(out_ptr + start * COUNT + source * row + columns, piece, mask=inside)
    _leave(lost, boxes_ptr, box, rank, turn, control_ptr, THREADS, COUNT, PROGRAMS, CAPACITY)
    tl.store(turns_ptr + program, 1 - turn)
