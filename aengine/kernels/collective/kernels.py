"""The kernels of sums and gathers: ranks push little data to each other, and pull much.

**Pushed.** Every rank pushes its part into its region of each other rank's mailbox. A program of one rank works only
with the programs of the same id on the other ranks, so not all programs need to run at once. It pushes some lanes, then
waits until the lanes of the others arrive in its memory. The data cross the link once, and nothing else crosses it.
While a program waits, other programs of its processor keep the link busy.

A mailbox, int32 [2, ranks, PROGRAMS, CAPACITY, 4], has two regions for each source and program. Calls use them
alternately, and a program keeps the number of the next one in its device's memory. So graphs can be replayed, and calls
of all sizes and kinds may follow each other.

Two regions are enough. Let program p of rank A push for its call n + 2. It has received what program p of rank B pushed
in call n + 1. Program p of B began that call after call n was complete on B, because kernels of one stream complete in
order. So before that, B had read what A pushed for call n, and emptied the region.

**Pulled.** Ranks send each other the addresses of their parts, then read and write there. A program works with programs
of the same id on the other ranks, through the same mailboxes. It sends its part's address, waits for the others'
addresses, and does its share. Then it waits until its writes have arrived, tells the others, and waits until they have
told it. When the kernel is complete, no rank reads or writes this rank's part any more.
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
    fence,
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
    """Return the address of the region in a mailbox into which this program of rank `source` pushes."""
    return box + (((turn * COUNT + source) * PROGRAMS + tl.program_id(0)).to(tl.int64)) * (CAPACITY * 16)


@triton.jit
def push(
    words, inside, at, boxes_ptr, rank, turn,
    COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Send lanes to every other rank's mailbox. at: int64 [lanes], offsets in the region in bytes."""
    for step in tl.static_range(1, COUNT):
        box = tl.load(boxes_ptr + (rank + step) % COUNT)
        send_lanes(region(box, turn, rank, COUNT, PROGRAMS, CAPACITY) + at, words, inside)


@triton.jit
def empty(inside, at, box, rank, turn, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write EMPTY over the lanes that all others pushed, after every thread of the program has read them."""
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
    normed_ptr,  # [lanes * 16 bytes], or None without a norm
    boxes_ptr,  # int64 [COUNT]: addresses of the ranks' mailboxes
    turns_ptr,  # int32 [PROGRAMS]
    control_ptr,  # int64 [2]
    rank,
    lanes,
    eps,
    ROW: tl.constexpr,  # lanes of an iteration; with a norm, all of a token's
    LANES: tl.constexpr,  # the next power of two from ROW
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
            x = widen(words, dtype)  # as rounded; from here on like elementwise.py
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
    LANES: tl.constexpr,  # of an iteration
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


@triton.jit
def _meet(
    word, second, place, lost, boxes_ptr, own_box, rank, turn, control_ptr,
    THREADS: tl.constexpr, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Send two int64 words to every rank, and wait for the words of all ranks.

    place: the lane of the regions into which they are sent. lost: 1 if an earlier wait timed out; then nothing is sent.
    Returns 1 if lost is 1 or this wait timed out, else 0.
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
    """Wait until all ranks are done, and empty the words that were sent here."""
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
    """Tell the other ranks that this rank's stream has copied its part, and wait until they tell it. One program."""
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
    """Return an address that a rank has sent by `_meet`. number: 0 for its first word, 1 for its second."""
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
    """Each rank adds up every COUNT-th block of all parts, and writes the sum into the results of all ranks."""
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
    """Every rank reads all parts and stores them in its own result."""
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
