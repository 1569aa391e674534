"""Products with weights of 4-bit codes (int4, MXFP4, NVFP4), unpacked on their way to the tensor cores."""
