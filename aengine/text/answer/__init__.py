"""Reading what a model answers: thoughts, calls of tools, content."""
