"""Sums and gathers over ranks, which are GPUs of one host or threads on a CPU."""
