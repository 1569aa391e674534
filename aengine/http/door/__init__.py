"""Middleware that every request passes: request id, hosts and origins, keys, body, bursts, errors."""
