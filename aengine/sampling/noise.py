"""Noise that depends only on (seed, position, token id).

Every token's noise is computed from a hash. So a seed determines the draw in any batch. The hash uses
unsigned 32-bit arithmetic modulo 2**32, so any device computes the same bits (`^` is xor, `>>` a logical shift):

    mix(x):                 x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16
    key0                  = mix(mix(mix(seed_low + 0x9E3779B9) + seed_high) + position)
    key1                  = mix(mix(mix(seed_high + 0x7F4A7C15) + seed_low) + position)
    hash32(.., token_id):   x = (token_id * 0x9E3779B1) ^ key0
                            x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= key1;  x ^= x >> 15;  x *= 0xC2B2AE35;  x ^= x >> 16
    u                     = ((hash32 >> 9) + 0.5) * 2**-23        exact in float32, strictly inside (0, 1)
    gumbel                = -log(-log(u))

torch has little unsigned arithmetic. int32 wraps around to the same bits. A logical shift is an arithmetic shift whose
copies of the sign bit are masked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signed32(x: int) -> int:
    """Return the int32 with the low 32 bits of x."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


_MULTIPLY_1 = signed32(0x85EBCA6B)
_MULTIPLY_2 = signed32(0xC2B2AE35)
_SPREAD_TOKENS = signed32(0x9E3779B1)
_START_0 = signed32(0x9E3779B9)
_START_1 = signed32(0x7F4A7C15)


def split_seed(seed: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of a 64-bit seed, signed or not, as int32 values."""
    return signed32(seed), signed32(seed >> 32)


def token_codes(vocab_size: int, device: torch.device) -> Tensor:
    """Return token_id * 0x9E3779B1 for all ids, [vocab] int32. All rows share this part of the hash."""
    return torch.arange(vocab_size, dtype=torch.int32, device=device).mul_(_SPREAD_TOKENS)


def row_keys(seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return key0 and key1 of each row. All arguments and results are [rows, 1] int32."""
    key0 = _mix(_mix(_mix(seed_low + _START_0) + seed_high) + positions)
    key1 = _mix(_mix(_mix(seed_high + _START_1) + seed_low) + positions)
    return key0, key1


def hash32(codes: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """Return the hash of every token of every row, [rows, vocab], given codes [vocab] and keys [rows, 1]; all int32."""
    x = codes ^ key0
    _xor_shifted(x, 16).mul_(_MULTIPLY_1).bitwise_xor_(key1)
    _xor_shifted(x, 15).mul_(_MULTIPLY_2)
    return _xor_shifted(x, 16)


def uniforms(x: Tensor) -> Tensor:
    """Turn int32 hashes into float32 strictly inside (0, 1). Overwrites x. Every step is exact."""
    return x.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)


def gumbel(codes: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """Return standard Gumbel noise [rows, vocab] float32. The argmax of logits + noise is a draw from their softmax."""
    return uniforms(hash32(codes, key0, key1)).log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    _xor_shifted(x, 16).mul_(_MULTIPLY_1)
    _xor_shifted(x, 13).mul_(_MULTIPLY_2)
    return _xor_shifted(x, 16)


def _xor_shifted(x: Tensor, bits: int) -> Tensor:
    """Compute x ^= x >> bits in place, with a logical shift."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))
