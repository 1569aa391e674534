"""The blocks of a decoder. Each takes the residual stream and returns it with its own result added."""
