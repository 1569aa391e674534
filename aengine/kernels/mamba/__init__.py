"""Mamba2: a recurrent layer whose state of a sequence is one matrix for each head."""
