"""Steps on a CUDA device: the runner, the clock that awaits events, and the captured graphs."""
