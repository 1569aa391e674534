"""Steps on a CUDA device: the runner, the clock that awaits events, and what is captured as graphs."""
