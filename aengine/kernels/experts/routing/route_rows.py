"""From one to a few tokens of the residual stream to their experts in one launch: norm, router, choice.

Every program norms a whole row and has the weights of some experts. It loads these before it waits for the kernel that
makes the row, so that it reads only the row after the wait. The last program of a row to arrive chooses.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.routing.choice import choose_one
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.parts import is_last
from aengine.kernels.variants import keep_variants

MAX_TOKENS = 4
MAX_EXPERTS = 256  # every expert is compared with every other
MAX_HIDDEN = 8192  # a program holds a whole row
PROGRAM = 4096  # elements of the router's weight that a program has in its registers
WARPS = 8


@keep_variants
@triton.jit(do_not_specialize=["first_slot"], do_not_specialize_on_alignment=["slots_ptr"])
def _route_rows_kernel(
    x_ptr,  # [tokens, K]
    norm_ptr,  # [K]
    w_ptr,  # [E, K]
    bias_ptr,  # [E], BIAS only
    correction_ptr,  # [E], CORRECTION only
    slots_ptr,  # [tokens]
    h_ptr,  # [tokens, K]: the normed rows
    ids_ptr,  # [tokens, TOP_K] int32
    weights_ptr,  # [tokens, TOP_K] float32
    logits_ptr,  # [tokens, EXPERTS] float32
    arrived_ptr,  # [tokens] int32, zero between launches
    eps,
    first_slot,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, padded to a power of two
    WIDTH: tl.constexpr,  # K, padded to a power of two
    BLOCK: tl.constexpr,  # experts of a program
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    programs: tl.constexpr = (E + BLOCK - 1) // BLOCK  # of a token
    token = tl.program_id(0) // programs
    block = tl.program_id(0) % programs
    e = block * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDTH)[None, :]
    inside = k < K
    if OVERLAP:
        gdc_launch_dependents()
    w = tl.load(w_ptr + tl.minimum(e, E - 1)[:, None] * K + k, mask=inside, other=0.0)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    nowhere = tl.load(slots_ptr + token) < first_slot  # the kernel before this one may have written it
    place = token.to(tl.int64) * K + k
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dtype = h_ptr.dtype.element_ty
    inverse = tl.math.rsqrt(tl.sum(x * x) / K + eps)
    # h is rounded to the model's dtype before the weight, as in the reference, and after it, as the experts see it.
    h = ((x * inverse).to(dtype).to(tl.float32) * norm).to(dtype)
    if block == 0:
        tl.store(h_ptr + place, h, mask=inside)
    logits_ptr += token * EXPERTS
    tl.store(logits_ptr + e, tl.sum(w.to(tl.float32) * h.to(tl.float32), axis=1) + bias, mask=e < E)
    if is_last(arrived_ptr + token, programs):
        every = tl.arange(0, EXPERTS)
        # Other processors wrote these, so read past the first-level cache.
        logits = tl.load(logits_ptr + every, mask=every < E, other=0.0, cache_modifier=".cg")
        choose_one(
            logits, correction_ptr, nowhere, ids_ptr + token * TOP_K, weights_ptr + token * TOP_K, scale,
            E, EXPERTS, TOP_K, SCORING, RENORMALISE, CORRECTION,
        )  # fmt: skip


class RouteRows:
    """The kernel and its scratch memory. Launches share the scratch, so use one stream at a time."""

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def supports(x: Tensor, weight: Tensor, router: Router) -> bool:
        """Return whether x [tokens, hidden] is few rows of which a program holds one, and weight [experts, hidden]
        fits.

        It fits with few experts that are not chosen by groups or by sparsemixer.
        """
        return (
            0 < len(x) <= MAX_TOKENS
            and weight.shape[0] <= MAX_EXPERTS
            and weight.shape[1] <= MAX_HIDDEN
            and router.groups == 1
            and router.scoring != "sparsemixer"
        )

    def __call__(
        self,
        x: Tensor,
        norm: Norm,
        weight: Tensor,
        router: Router,
        correction: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        slots: Tensor,
        first_slot: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden], weight [experts, hidden] -> norm(x), ids int32 and weights float32, both [tokens, top_k].

        This only enqueues. Raises: ValueError if not `supports`.

        Args:
            correction: [experts], added to the scores for the choice only.
            bias: [experts], of the product.
            slots: [tokens] int64. Tokens of slots below `first_slot` are padding, and have ids of -1.
        """
        if not self.supports(x, weight, router):
            raise ValueError(f"{len(x)} rows and a router {list(weight.shape)} are not for this kernel")
        x, weight = x.contiguous(), weight.contiguous()
        (tokens, hidden), experts = x.shape, weight.shape[0]
        router.check(experts)
        h = torch.empty_like(x)
        ids = torch.empty(tokens, router.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(tokens, router.top_k, dtype=torch.float32, device=x.device)
        logits, arrived = self._scratch_for(x.device)
        width = power_of_two(hidden)
        block = min(power_of_two(experts), max(1, PROGRAM // width))
        overlap = launch_for(x.device).overlap
        _route_rows_kernel[(tokens * -(-experts // block),)](
            x, norm.weight, weight, x if bias is None else bias, x if correction is None else correction, slots,
            h, ids, weights, logits, arrived, norm.eps, first_slot, router.scale,
            E=experts, K=hidden, EXPERTS=power_of_two(experts), WIDTH=width,
            BLOCK=block, TOP_K=router.top_k, SCORING=router.scoring, RENORMALISE=router.renormalise,
            BIAS=bias is not None, CORRECTION=correction is not None, OVERLAP=overlap, num_warps=WARPS,
            # Both sides of a comparison must be computed alike. If the compiler fused a correction with the product
            # before it on one side only, an expert could rank above itself, and its place would stay empty.
            enable_fp_fusion=False, launch_pdl=overlap,
        )  # fmt: skip
        return h, ids, weights

    def _scratch_for(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return memory for logits and counters."""
        if device not in self._scratch:
            self._scratch[device] = (
                torch.empty(MAX_TOKENS * MAX_EXPERTS, dtype=torch.float32, device=device),
                torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device),
            )
        return self._scratch[device]
