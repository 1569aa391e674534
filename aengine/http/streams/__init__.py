"""Replies that stream or wait, and what may stand between them and the engine."""
