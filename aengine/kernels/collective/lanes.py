"""Lanes of 16 bytes, four words each, in the memory of any device of the host.

A lane needs neither a flag nor a fence. The receiver's memory holds EMPTY words until the data arrive, word by word.
The receiver then writes EMPTY again. EMPTY is a NaN in every float type. If a part contains it, another NaN is sent.

A tensor of lanes is a tuple of its four words, each int32 [lanes]. As floats it is a tuple of eight tensors; for
float32 every second one is unused.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)


@triton.jit
def load_lanes(address, inside):
    """Load lanes from these addresses, int64 [lanes]. Lanes that are not inside are zero."""
    a, b, c, d = tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
        }""", "=&r,=&r,=&r,=&r,l,r", [address, inside.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def store_lanes(address, words, inside):
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $6, 0;
        @p st.global.v4.b32 [$1], {$2, $3, $4, $5};
        mov.b32 $0, 0;
        }""", "=r,l,r,r,r,r,r",
        [address, words[0], words[1], words[2], words[3], inside.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def send_lanes(address, words, inside):
    """Store words to the memory of another device. No word may be EMPTY."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $6, 0;
        @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
        mov.b32 $0, 0;
        }""", "=r,l,r,r,r,r,r",
        [address, words[0], words[1], words[2], words[3], inside.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def gave_up(control_ptr):
    """Return 1 if a wait of an earlier kernel on this device timed out, else 0.

    Then this device must send nothing more, because the others would use it instead of the data they wait for.
    """
    return tl.load(control_ptr.to(tl.pointer_type(tl.int32)))


@triton.jit
def receive_lanes(address, inside, control_ptr):
    """Read lanes of this device's memory until no word is EMPTY.

    Each thread waits for its lanes. After every 64 reads it reads control: [0] is not zero if a thread of this device
    gave up. [1] holds the nanoseconds after which the thread itself gives up and sets [0]. Then its words are invalid.
    """
    a, b, c, d = tl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .b32 n, failed;
        .reg .b64 now, end, patience;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        mov.b32 n, 0;
        mov.b64 end, 0;
        setp.eq.s32 p, $5, 0;
        @p bra RECEIVED;
        AGAIN:
        ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
        setp.eq.s32 p, $0, -1;
        setp.eq.or.s32 p, $1, -1, p;
        setp.eq.or.s32 p, $2, -1, p;
        setp.eq.or.s32 p, $3, -1, p;
        @!p bra RECEIVED;
        add.u32 n, n, 1;
        and.b32 failed, n, 63;
        setp.ne.u32 q, failed, 0;
        @q bra AGAIN;
        ld.relaxed.sys.global.b32 failed, [$6];
        setp.ne.u32 q, failed, 0;
        @q bra RECEIVED;
        mov.u64 now, %globaltimer;
        setp.eq.u64 q, end, 0;
        ld.relaxed.sys.global.b64 patience, [$6 + 8];
        @q add.u64 end, now, patience;
        setp.lt.u64 q, now, end;
        @q bra AGAIN;
        mov.b32 failed, 1;
        st.relaxed.sys.global.b32 [$6], failed;
        RECEIVED:
        }""", "=&r,=&r,=&r,=&r,l,r,l", [address, inside.to(tl.int32), control_ptr.to(tl.int64)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def fence(lane):
    """Order all memory accesses of each thread so far before its later ones, as seen by all devices.

    lane: any tensor with an element for each thread.
    """
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, 0;", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sealed(words):
    """Replace EMPTY by another NaN, so that the words can be sent."""
    a, b, c, d = words
    return (
        tl.where(a == EMPTY, -2, a),
        tl.where(b == EMPTY, -2, b),
        tl.where(c == EMPTY, -2, c),
        tl.where(d == EMPTY, -2, d),
    )


@triton.jit
def chosen(condition, words, others):
    """Choose words if the condition is true, else others."""
    return (
        tl.where(condition, words[0], others[0]),
        tl.where(condition, words[1], others[1]),
        tl.where(condition, words[2], others[2]),
        tl.where(condition, words[3], others[3]),
    )


@triton.jit
def widen(words, DTYPE: tl.constexpr):
    """Return all elements as float32."""
    a, b = _widen(words[0], DTYPE)
    c, d = _widen(words[1], DTYPE)
    e, f = _widen(words[2], DTYPE)
    g, h = _widen(words[3], DTYPE)
    return a, b, c, d, e, f, g, h


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round each element to DTYPE, and return them as words: the reverse of `widen`."""
    return (
        _narrow(x[0], x[1], DTYPE),
        _narrow(x[2], x[3], DTYPE),
        _narrow(x[4], x[5], DTYPE),
        _narrow(x[6], x[7], DTYPE),
    )


@triton.jit
def add(x, y):
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3], x[4] + y[4], x[5] + y[5], x[6] + y[6], x[7] + y[7]


@triton.jit
def multiply(x, y):
    return x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3], x[4] * y[4], x[5] * y[5], x[6] * y[6], x[7] * y[7]


@triton.jit
def total(x):
    """Return the sum of each lane's floats, [lanes]."""
    return x[0] + x[1] + x[2] + x[3] + x[4] + x[5] + x[6] + x[7]


@triton.jit
def _widen(word, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        low = word.to(tl.float32, bitcast=True)
        high = tl.zeros_like(low)
    elif tl.bfloat16 == DTYPE:
        low, high = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _narrow(low, high, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        word = low.to(tl.int32, bitcast=True)
    else:
        low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        high = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        word = (low & 0xFFFF) | (high << 16)
    return word
