"""Responses that stream or wait, and the streams between them and the engine."""
