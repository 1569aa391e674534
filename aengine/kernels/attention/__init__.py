"""Attention of single queries over pages, and what prefill reads of them."""
