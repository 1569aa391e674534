"""Attention over the paged KV cache.

`base` describes a layer and a step, and has the protocols. A backend binds each layer once. `torch_backend` is the
reference and runs on CPUs; `triton_backend` runs on GPUs. On GPUs, prefill chunks have separate kernels: from `flash4`
(flash-attn-4), `flash_backend` (flash-attn-2 or torch), or `triton_backend` itself.
"""
