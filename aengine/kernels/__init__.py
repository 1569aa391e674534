"""The math of a decoder layer without its attention: one protocol, one implementation per device kind."""
