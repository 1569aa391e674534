"""The memory that layers keep between steps: bookkeeping of pages and of memory filed under them, and the tensors.

Start with `pages` (the allocator) and `radix` (prefix sharing). Some models and configurations need more: `windows`
for sliding windows, `snapshots` for recurrent states, `tiers/` for host memory and disk. The tensors are in `kv` and
`states`.

This module imports nothing, because only `kv` and `states` need torch.
"""
