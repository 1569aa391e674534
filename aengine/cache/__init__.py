"""What layers keep between steps: bookkeeping of pages and of everything that is filed under them, and the tensors.

Start with `pages` (the allocator) and `radix` (prefix sharing). Some models and configurations add to these: `windows`
for sliding windows, `snapshots` for recurrent states, `tiers/` for host memory and disk. The tensors are in `kv` and
`states`.

Nothing is imported here: only `kv` and `states` load torch.
"""
