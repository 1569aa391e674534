"""Formats of tool calls, a file for each family of models, which detects, parses and describes its format."""
