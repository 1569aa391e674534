"""`aengine generate`: runs prompts from a file or a pipe through a model."""
