"""Requests: their arguments, their sequences, the registry of running requests, and their streams."""
