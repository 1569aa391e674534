"""Parsing of answers: thoughts, calls of tools, content."""
