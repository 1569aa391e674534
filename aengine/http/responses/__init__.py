"""OpenAI's `/v1/responses`: requests, items, events and endpoints."""
