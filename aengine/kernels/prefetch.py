"""Ask memory for what a kernel will need, before it may wait for the kernel that precedes it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(addresses, COUNT: tl.constexpr):
    """Bring COUNT elements from each address into the second-level cache: 16-byte aligned, a multiple of 16 bytes."""
    size = tl.full(addresses.shape, COUNT * addresses.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses.to(tl.int64, bitcast=True), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
