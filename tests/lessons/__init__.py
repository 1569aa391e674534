"""The story of the engine in nine stages. Each holds the same 20 greedy tokens against transformers."""
