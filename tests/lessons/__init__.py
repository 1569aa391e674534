"""The engine in nine lessons. Each compares the same 20 greedy tokens with those of transformers.

A lesson names the files to read with it.
"""
