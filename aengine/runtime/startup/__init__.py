"""Start-up: makes a runtime from knobs and a checkpoint. It sizes memory, compiles kernels and warms up steps."""
