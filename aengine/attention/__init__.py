"""Attention over the paged KV cache.

`base` has the description of a layer and of a step, and the protocols. A backend binds each layer once: `torch_backend`
is the reference and runs on CPUs, `triton_backend` runs on GPUs. There, prefill chunks have kernels of their own, from
`flash4` (flash-attn-4), `flash_backend` (flash-attn-2 or torch), or `triton_backend` itself.
"""
