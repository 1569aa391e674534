"""Low-rank adapters: what each token's own adapter adds to the products of the model."""
