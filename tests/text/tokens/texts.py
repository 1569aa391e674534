"""Texts that every tokenizer must encode and decode."""

from __future__ import annotations

TEXTS = ["hello world", " leading", "", "a<|im_end|>b<think>c", "你好 👋🏽 é", "x" * 300, "\n\n \t"]
