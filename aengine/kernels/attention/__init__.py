"""Attention over pages: decodes, prefill chunks, shared prefixes, latents; and the kernels that write their inputs."""
