"""Values of arguments: converts them to JSON as they come, and describes them to grammars."""
