"""Compiles kernels during start-up, in other processes that rehearse the steps without a GPU."""
