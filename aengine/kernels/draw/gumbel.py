"""Draws a token from each row of logits in one pass over the vocabulary and one launch, without a sort.

A draw is the argmax of logits + temperature * noise, with the lowest id among equals. At temperature 0 it is the argmax
of the logits. The noise is a hash of (seed, position, token id), with the same bits as in `aengine.sampling.noise`. A
row is divided into pieces. The last program of a row picks the best of all pieces' candidates. Tokens below a row's
floor (`aengine.kernels.draw.cutoff`) are never drawn.

Two exact logarithms for each token would take four times as long as reading the logits. So each block of tokens first
gets an upper bound, which takes a few instructions. Only a block whose bound exceeds the best score so far gets exact
noise. In random order, about log(n) of n blocks need it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.parts import is_last
from aengine.kernels.variants import keep_variants

BLOCK = 1024
PIECES = 64  # the most pieces of a row
LONG_PIECE = 38  # blocks of a piece; with enough rows, shorter pieces are not faster
STAGES = 3


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def row_keys(seed_low, seed_high, position):
    """Return key0 and key1, which all tokens of a row share. All arguments and results are uint32."""
    low: tl.constexpr = 0x9E3779B9
    high: tl.constexpr = 0x7F4A7C15
    key0 = _mix(_mix(_mix(seed_low + low) + seed_high) + position)
    key1 = _mix(_mix(_mix(seed_high + high) + seed_low) + position)
    return key0, key1


@triton.jit
def hash32(token_ids, key0, key1):
    """Return the hashes of token ids; all uint32."""
    x = (token_ids * 0x9E3779B1) ^ key0
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= key1
    x ^= x >> 15
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def gumbel(hashes):
    """Return standard Gumbel noise, float32, for uint32 hashes."""
    return -tl.log(-tl.log(((hashes >> 9).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-23)))


@triton.jit
def gumbel_rank(hashes):
    """Return a float32 r with gumbel <= log(2) * (159 - r * 2**-23).

    In the tail, where draws are decided, the bound exceeds the noise by at most 0.08. With w = 1 - u, -log(u) >= w, so
    gumbel <=
    -log(w). The bits of a float, read as an integer and scaled, are its exponent plus its mantissa, which is at most
    its log2. The integer below is exactly w * 2**32.
    """
    rest = ((hashes ^ 0xFFFFFFFF) & 0xFFFFFE00) | 0x100
    return rest.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def can_beat(value, temperature):
    """Return a threshold: only if `x - temperature * log(2) * r * 2**-23` exceeds it, a score may exceed `value`.

    The threshold has a margin for rounding.
    """
    top: tl.constexpr = 159.0 * 0.6931472 + 1e-3
    return value - tl.abs(value) * 1e-6 - temperature * top


@triton.jit
def _best(values, ids):
    """Return the highest value, and the lowest of its ids."""
    highest = tl.max(values, axis=0)
    return highest, tl.min(tl.where(values == highest, ids, 0x7FFFFFFF), axis=0)


@keep_variants
@triton.jit(
    do_not_specialize=["parameter_stride", "pieces", "first", "valid"],
    do_not_specialize_on_alignment=["lines_ptr", "positions_ptr", "ids_ptr", "finite_ptr"],  # parts of a step's numbers
)
def _draw_kernel(
    logits_ptr,  # [rows, VOCAB]
    lines_ptr,  # [rows] int64
    temperature_ptr,  # [all] float32
    seed_low_ptr,  # [all] int32
    seed_high_ptr,  # [all] int32
    positions_ptr,  # [rows] int64
    floor_ptr,  # [rows] float32, or None
    ids_ptr,  # [rows] int64
    finite_ptr,  # [rows] bool
    candidates_ptr,  # int32 [rows, 4]: instead of ids and finite, or None
    best_ptr,  # [rows, PIECES] float32
    best_id_ptr,  # [rows, PIECES] int32
    bad_ptr,  # [rows, PIECES] int32: 1 if a logit is NaN or +inf
    arrived_ptr,  # [rows] int32, zero between launches
    parameter_stride,
    pieces,
    first,  # the token of the first column
    valid,  # number of columns that are tokens
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) // pieces
    piece = tl.program_id(0) % pieces
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.load(lines_ptr + row)
    temperature = tl.load(temperature_ptr + line * parameter_stride)
    seed_low = tl.load(seed_low_ptr + line * parameter_stride).to(tl.uint32, bitcast=True)
    seed_high = tl.load(seed_high_ptr + line * parameter_stride).to(tl.uint32, bitcast=True)
    key0, key1 = row_keys(seed_low, seed_high, tl.load(positions_ptr + row).to(tl.uint32))
    logits = logits_ptr + row.to(tl.int64) * VOCAB
    length = tl.cdiv(VOCAB, pieces * BLOCK) * BLOCK  # whole blocks, perhaps beyond the row's end
    floor = float("-inf")
    if floor_ptr is not None:
        floor = tl.load(floor_ptr + row)
    lanes = tl.arange(0, BLOCK)
    value = float("-inf")
    value_id = 0x7FFFFFFF
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    step = temperature * (-0.6931472 * 2.0**-23)
    for start in tl.range(piece * length, piece * length + length, BLOCK, num_stages=STAGES):
        columns = start + lanes
        ids = first + start + lanes
        x = tl.load(logits + columns, mask=columns < valid, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x, propagate_nan=tl.PropagateNan.ALL)
        if floor_ptr is not None:
            x = tl.where(x < floor, float("-inf"), x)
        hopes = x
        if temperature > 0:
            hopes = tl.math.fma(gumbel_rank(hash32(ids.to(tl.uint32), key0, key1)), step, x)
        if tl.max(hopes, axis=0) > can_beat(value, temperature):
            sound = tl.where(x < float("inf"), x, float("-inf"))
            if temperature > 0:
                sound = gumbel(hash32(ids.to(tl.uint32), key0, key1)) * temperature + sound
            block_value, block_id = _best(sound, ids)
            # Among equals the earlier id wins.
            value_id = tl.where(block_value > value, block_id, value_id)
            value = tl.maximum(block_value, value)

    bad_any = tl.max(tl.where(highest < float("inf"), 0, 1), axis=0)
    slot = row * PIECES + piece
    tl.store(best_ptr + slot, value)
    tl.store(best_id_ptr + slot, value_id)
    tl.store(bad_ptr + slot, bad_any)
    if is_last(arrived_ptr + row, pieces):
        slots, used = row * PIECES + tl.arange(0, PIECES), tl.arange(0, PIECES) < pieces
        # Other processors wrote these: do not read them from the first-level cache.
        value, value_id = _best(
            tl.load(best_ptr + slots, mask=used, other=float("-inf"), cache_modifier=".cg"),
            tl.load(best_id_ptr + slots, mask=used, other=0x7FFFFFFF, cache_modifier=".cg"),
        )
        bad_any = tl.max(tl.load(bad_ptr + slots, mask=used, other=0, cache_modifier=".cg"), axis=0)
        if candidates_ptr is None:
            # A row with only -inf or NaN has no best token, so store a valid id.
            tl.store(ids_ptr + row, tl.where(value_id == 0x7FFFFFFF, 0, value_id).to(tl.int64))
            tl.store(finite_ptr + row, (bad_any == 0) & (value > float("-inf")))
        else:
            tl.store(candidates_ptr + row * 4, value.to(tl.int32, bitcast=True))
            tl.store(candidates_ptr + row * 4 + 1, value_id)
            tl.store(candidates_ptr + row * 4 + 2, bad_any)
            tl.store(candidates_ptr + row * 4 + 3, 0)


@keep_variants
@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    candidates_ptr,  # int32 [rows, COUNT, 4]
    ids_ptr,  # [rows] int64
    finite_ptr,  # [rows] bool
    rows,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    value_id = tl.zeros([BLOCK], tl.int32)
    bad_any = tl.zeros([BLOCK], tl.int32)
    for rank in tl.static_range(COUNT):  # in the order of token ids, because among equals the lower id wins
        place = candidates_ptr + (row * COUNT + rank) * 4
        other = tl.load(place, mask=inside, other=0).to(tl.float32, bitcast=True)
        other_id = tl.load(place + 1, mask=inside, other=0)
        bad_any |= tl.load(place + 2, mask=inside, other=0)
        value_id = tl.where(other > value, other_id, value_id)
        value = tl.maximum(other, value)
    tl.store(ids_ptr + row, value_id.to(tl.int64), mask=inside)
    tl.store(finite_ptr + row, (bad_any == 0) & (value > float("-inf")), mask=inside)


class Draw:
    """The kernel and its scratch memory. All launches share the scratch, so they must be on one stream at a time."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._best = torch.empty(max_rows * PIECES, dtype=torch.float32, device=device)
        self._best_id = torch.empty(max_rows * PIECES, dtype=torch.int32, device=device)
        self._bad = torch.empty(max_rows * PIECES, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        positions: Tensor,
        lines: Tensor,
        floor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ids [rows] int64, and whether each row is finite, [rows] bool.

        A row is not finite if it has NaN or +inf, or only -inf.

        Args:
            logits: [rows, vocab], contiguous; only read.
            temperature, seed_low, seed_high: float32, int32 and int32 [all rows], with the same stride.
            positions: [rows] int64, contiguous.
            lines: [rows] int64, the index of each row's parameters.
            floor: [rows] float32, contiguous; tokens below it are not drawn.
        """
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
        self._launch(logits, temperature, seed_low, seed_high, positions, lines, floor, ids, finite, None, 0, vocab)
        return ids, finite

    def candidates(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        positions: Tensor,
        lines: Tensor,
        first: int,
        valid: int,
    ) -> Tensor:
        """Draw from part of the vocabulary. Returns candidates for `choose`, int32 [rows, 4].

        The four numbers of a candidate are the bits of its float32 score, its token id, 1 if a logit is NaN or +inf,
        and 0.

        logits: [rows, n], for the tokens from `first` on; only the first `valid` columns are read. Other arguments are
        as in `__call__`.
        """
        found = torch.empty(len(logits), 4, dtype=torch.int32, device=logits.device)
        self._launch(
            logits, temperature, seed_low, seed_high, positions, lines, None, found, found, found, first,
            max(0, min(valid, logits.shape[1])),
        )  # fmt: skip
        return found

    def _launch(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        positions: Tensor,
        lines: Tensor,
        floor: Tensor | None,
        ids: Tensor,
        finite: Tensor,
        candidates: Tensor | None,
        first: int,
        valid: int,
    ) -> None:
        rows, vocab = logits.shape
        if rows == 0:
            return
        launch = launch_for(logits.device)
        # A few rows get more pieces, to fill the device. Long pieces compute exact noise for fewer blocks.
        pieces = min(PIECES, power_of_two(-(-vocab // BLOCK)))
        least = max(1, min(4, power_of_two(-(-vocab // (LONG_PIECE * BLOCK)))))
        while pieces > least and rows * pieces > 6 * launch.processors:
            pieces //= 2
        _draw_kernel[(rows * pieces,)](
            logits, lines, temperature, seed_low, seed_high, positions, floor, ids, finite, candidates,
            self._best, self._best_id, self._bad, self._arrived, temperature.stride(0), pieces, first, valid,
            VOCAB=vocab, PIECES=PIECES, BLOCK=BLOCK, STAGES=STAGES, OVERLAP=launch.overlap,
            # Without fusion, products are rounded before sums, like in the reference. Scores are compared for equality,
            # so copies that the compiler makes must round alike. Registers suffice for four programs a processor.
            num_warps=4, maxnreg=128, enable_fp_fusion=False, launch_pdl=launch.overlap,
        )  # fmt: skip


def choose(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the best candidate of each row. Returns ids [rows] int64, and whether each row is finite, [rows] bool.

    candidates: int32 [rows, parts, 4] of `Draw.candidates`, in the order of the tokens.
    """
    rows, parts = candidates.shape[:2]
    ids = torch.empty(rows, dtype=torch.int64, device=candidates.device)
    finite = torch.empty(rows, dtype=torch.bool, device=candidates.device)
    if rows:
        overlap = launch_for(candidates.device).overlap
        _choose_kernel[(triton.cdiv(rows, 32),)](
            candidates, ids, finite, rows, COUNT=parts, BLOCK=32, OVERLAP=overlap, num_warps=1, launch_pdl=overlap
        )
    return ids, finite
