"""Gated delta nets: linear attention whose state of a sequence is one matrix for each head."""
