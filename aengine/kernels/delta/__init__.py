"""Gated delta nets: linear attention whose memory of a sequence is one matrix a head."""
