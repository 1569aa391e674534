"""Kernels compiled ahead: a rehearsal of the steps without a GPU, in processes beside the start-up."""
