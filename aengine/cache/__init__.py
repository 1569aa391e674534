"""The KV cache: page accounting (`pages`), prefix sharing (`radix`) and the tensors themselves (`kv`).

Nothing is imported here, because only `kv` may load torch.
"""
