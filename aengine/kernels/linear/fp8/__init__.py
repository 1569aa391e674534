"""Products with weights of 8-bit floats. One row is not rounded; more are in FP8."""
