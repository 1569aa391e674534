"""Structured output: requested forms compiled to grammars, and masks of allowed tokens."""
