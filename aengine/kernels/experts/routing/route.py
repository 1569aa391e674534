"""From hidden states to experts and weights in one launch: the router's product in float32, then the choice.

Products of two-byte numbers are exact in float32, and are summed there. For few tokens the columns are split over
programs. These load their weights before they wait for the kernel that makes the hidden states. The last one to arrive
adds the parts up in order and chooses.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.routing.choice import choose
from aengine.kernels.experts.routing.route_rows import RouteRows
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.launch import Launch, launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.parts import Parts, is_last, sum_parts
from aengine.kernels.variants import keep_variants

MAX_EXPERTS = 512
FEW_TOKENS = 512  # up to here the columns are split
MOST_SPLITS = 32
MOST_LOOPED = 16  # splits, if a program goes through its columns in steps
IN_REGISTERS = 65536  # most elements of the weight of a program that loads its columns at once


@keep_variants
@triton.jit(do_not_specialize=["tokens", "first_slot"], do_not_specialize_on_alignment=["slots_ptr"])
def _route_kernel(
    x_ptr,  # [tokens, K]
    w_ptr,  # [E, K]
    bias_ptr,  # [E], BIAS only
    correction_ptr,  # [E], CORRECTION only
    slots_ptr,  # [tokens], PADDED only
    ids_ptr,  # [tokens, TOP_K] int32
    weights_ptr,  # [tokens, TOP_K] float32
    part_ptr,  # [blocks of tokens, SPLITS, M, EXPERTS] float32
    arrived_ptr,  # [blocks of tokens] int32, zero between launches
    tokens,
    first_slot,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,  # tokens of a program
    EXPERTS: tl.constexpr,  # E, padded to a power of two
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    PADDED: tl.constexpr,  # tokens of slots below first_slot go nowhere
    JITTER: tl.constexpr,
    WIDE: tl.constexpr,  # x and the weights differ in dtype, or have 4 bytes an element
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    PIECE: tl.constexpr = K // SPLITS
    rows = tl.arange(0, M)
    t = block * M + rows
    used = (t < tokens)[:, None]
    e = tl.arange(0, EXPERTS)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_rows = x_ptr + t.to(tl.int64)[:, None] * K + split * PIECE
    w_rows = w_ptr + tl.minimum(e, E - 1)[:, None] * K + split * PIECE
    if OVERLAP:
        gdc_launch_dependents()
    if PIECE <= BLOCK_K:
        w = tl.load(w_rows + k) if PIECE == BLOCK_K else tl.load(w_rows + k, mask=k < PIECE, other=0.0)
        if OVERLAP:
            gdc_wait()
        x = tl.load(x_rows + k, mask=used & (k < PIECE), other=0.0)
        logits = _product(x, w, tl.zeros([M, EXPERTS], tl.float32), WIDE)
    else:
        if OVERLAP:
            gdc_wait()
        logits = tl.zeros([M, EXPERTS], tl.float32)
        for step in tl.range(0, PIECE, BLOCK_K, num_stages=STAGES):
            inside = step + k < PIECE
            w = tl.load(w_rows + step + k, mask=inside, other=0.0)
            x = tl.load(x_rows + step + k, mask=used & inside, other=0.0)
            logits = _product(x, w, logits, WIDE)
    if SPLITS > 1:
        size: tl.constexpr = M * EXPERTS
        parts = part_ptr + block * (SPLITS * size) + rows[:, None] * EXPERTS + e[None, :]
        tl.store(parts + split * size, logits, mask=used)
        last = is_last(arrived_ptr + block, SPLITS)
        if last:
            logits = sum_parts(parts, size, SPLITS, used, UNROLLED=True)
    else:
        last = True
    if last:
        if BIAS:
            logits += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
        choose(
            logits, correction_ptr, slots_ptr, ids_ptr, weights_ptr, t, tokens, first_slot, scale, E, EXPERTS, M,
            TOP_K, SCORING, RENORMALISE, GROUPS, CHOSEN_GROUPS, BEST_TWO, CORRECTION, PADDED, JITTER,
        )  # fmt: skip


@triton.jit
def _product(x, w, acc, WIDE: tl.constexpr):
    """Return acc [M, EXPERTS] + x w^T of x [M, BLOCK_K], w [EXPERTS, BLOCK_K]."""
    if WIDE:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """How a router is divided. tokens: of a program. splits: pieces of the columns."""

    tokens: int
    block_k: int
    splits: int
    stages: int
    warps: int


def route_config(tokens: int, experts: int, hidden: int, wide: bool, launch: Launch) -> RouteConfig:
    """Return how to divide a router [experts, hidden] for `tokens` tokens, measured on an H200."""
    padded = max(16, power_of_two(experts))
    warps = 8 if padded >= 128 else 4
    if tokens > FEW_TOKENS and wide:
        return RouteConfig(32, 16, 1, 2, warps)
    if tokens > FEW_TOKENS:
        # With many experts, 16 tokens keep a program busy, until there are more programs than processors.
        height, low = (64, 0) if padded <= 128 else (64, 16) if padded <= 256 else (32, 64)
        if tokens <= low * launch.processors:
            height = 16
        stages = min(5, max(1, (launch.shared_memory - 1024) // ((height + padded) * 64 * 2)))
        return RouteConfig(height, 64, 1, stages, 8 if padded > 128 else 4)
    piece = min(256 if wide else 512, IN_REGISTERS // padded)
    whole = (count for count in range(-(-hidden // piece), MOST_SPLITS + 1) if hidden % (8 * count) == 0)
    looped = (count for count in range(MOST_LOOPED, 0, -1) if hidden % (32 * count) == 0)
    splits = next(whole, None)
    if splits is None or wide:
        return RouteConfig(16, 16 if wide else 32, splits or next(looped, 1), 2, warps)
    return RouteConfig(16, max(16, power_of_two(hidden // splits)), splits, 1, warps)


class Route:
    """The kernel and its scratch memory. Launches share the scratch, so use one stream at a time."""

    def __init__(self) -> None:
        self._parts = Parts()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        router: Router,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        first_slot: int = 0,
        config: RouteConfig | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden], weight [experts, hidden] -> ids int32 [tokens, top_k], weights float32 [tokens, top_k].

        This only enqueues. Raises: ValueError for more than 512 experts, or fewer than `router` needs.

        Args:
            bias: [experts], of the product.
            correction: [experts], added to the scores for the choice only.
            slots: [tokens] int64. Tokens of slots below `first_slot` are padding, and have ids of -1.
        """
        x, weight = x.contiguous(), weight.contiguous()
        (tokens, hidden), experts = x.shape, weight.shape[0]
        router.check(experts)
        if experts > MAX_EXPERTS:
            raise ValueError(f"{experts} experts: this router's kernel knows {MAX_EXPERTS} at most")
        ids = torch.empty(tokens, router.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(tokens, router.top_k, dtype=torch.float32, device=x.device)
        if not tokens:
            return ids, weights
        launch = launch_for(x.device)
        wide = x.dtype != weight.dtype or x.element_size() > 2
        config = config or route_config(tokens, experts, hidden, wide, launch)
        blocks, padded = -(-tokens // config.tokens), max(16, power_of_two(experts))
        parts, arrived = x, x
        if config.splits > 1:  # room for any number of tokens, so that all share it
            most = max(blocks, -(-FEW_TOKENS // config.tokens))
            parts, arrived = self._parts(x.device, most * config.splits * config.tokens * padded, most)
        _route_kernel[(blocks * config.splits,)](
            x, weight, x if bias is None else bias, x if correction is None else correction,
            x if slots is None else slots, ids, weights, parts, arrived, tokens, first_slot, router.scale,
            E=experts, K=hidden, M=config.tokens, EXPERTS=padded, BLOCK_K=config.block_k, SPLITS=config.splits,
            STAGES=config.stages, TOP_K=router.top_k, SCORING=router.scoring, RENORMALISE=router.renormalise,
            GROUPS=router.groups, CHOSEN_GROUPS=router.chosen_groups, BEST_TWO=router.group_score == "top2",
            BIAS=bias is not None, CORRECTION=correction is not None, PADDED=slots is not None, WIDE=wide,
            JITTER=router.jitter, OVERLAP=launch.overlap, num_warps=config.warps, launch_pdl=launch.overlap,
        )  # fmt: skip
        return ids, weights


class TritonRoute:
    """The choice of one layer's experts."""

    def __init__(
        self,
        weight: Tensor,
        correction: Tensor | None,
        router: Router,
        route: Route,
        route_rows: RouteRows,
        bias: Tensor | None = None,
    ) -> None:
        """weight [experts, hidden], correction and bias [experts]. route, route_rows: shared by all layers, for their
        scratch.
        """
        self._weight = weight
        self._correction = correction
        self._bias = bias
        self._router = router
        self._route = route
        self._route_rows = route_rows

    def after(self, norm: Norm | None, x: Tensor, slots: Tensor, first_slot: int) -> tuple[Tensor, Tensor, Tensor]:
        if norm is not None and norm.is_rms and self._route_rows.supports(x, self._weight, self._router):
            return self._route_rows(
                x, norm, self._weight, self._router, self._correction, self._bias, slots=slots, first_slot=first_slot
            )
        h = x if norm is None else norm(x)
        ids, weights = self._route(
            h, self._weight, self._router, self._bias, self._correction, slots=slots, first_slot=first_slot
        )
        return h, ids, weights
