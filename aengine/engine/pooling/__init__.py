"""Requests that draw nothing: embeddings, scores of pairs, rankings and classes."""
