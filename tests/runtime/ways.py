"""Kinds of draws that use different kernels or variants."""

from __future__ import annotations

from typing import Any

WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "min_tokens": 4},
    {"temperature": 0, "prompt_logprobs": 2},
]
