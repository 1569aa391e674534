"""Structured output: compiles requested forms to grammars and fills masks of allowed tokens."""
