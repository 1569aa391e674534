"""Anthropic's Messages API: requests, content blocks, events and endpoints."""
