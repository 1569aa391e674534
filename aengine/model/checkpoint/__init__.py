"""Reads the files of a checkpoint: checks headers first, then reads tensors in order, directly into their memory."""
