"""The KV cache: page accounting (`pages`), prefix sharing (`radix`), sliding windows, and the tensors (`kv`).

Nothing is imported here, because only `kv` may load torch.
"""
