"""Low-rank adapters of linears and experts; each token may have another one."""
