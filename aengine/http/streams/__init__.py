"""Responses as server-sent events or as one JSON document, and what they do with fragments."""
