"""Values that are not JSON: read as they come, and described to grammars by their schemas."""
