"""Structured output: from what a request asks for to masks of allowed tokens."""
