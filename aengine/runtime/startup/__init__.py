"""From knobs and a checkpoint folder to a runtime that is ready: sizes, memory, kernels compiled, steps warmed up."""
