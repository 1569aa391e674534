"""Products with weights of 8-bit floats: few rows at the speed of memory, many in FP8."""
