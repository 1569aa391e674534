"""Responses as server-sent events or as one JSON document, and how they combine fragments."""
