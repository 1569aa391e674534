"""How families of models write calls of tools: a file a family, which detects, parses and describes its format."""
