"""Formats of tool calls: each family of models has a file that detects, parses and describes its format."""
