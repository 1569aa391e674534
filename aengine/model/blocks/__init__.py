"""The blocks of a decoder. Each adds its result to the residual stream."""
