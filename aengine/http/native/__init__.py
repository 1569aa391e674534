"""aengine's own endpoints: generating text with ids, and tokenizing."""
