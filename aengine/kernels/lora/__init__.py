"""Low-rank adapters: each token may have another one."""
