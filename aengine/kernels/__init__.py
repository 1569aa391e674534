"""The computations of a model: one protocol, with a torch implementation for any device and Triton kernels for CUDA."""
