"""Reads the answers of a request: its thoughts, calls of its tools, and what of it must have a form."""
