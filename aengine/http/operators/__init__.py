"""Endpoints for operators: health, load, metrics, sleep, adapters, aborting, documents, the page."""
