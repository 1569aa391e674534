"""Endpoints whose prompts are pooled: embeddings, classes, scores and rankings."""
