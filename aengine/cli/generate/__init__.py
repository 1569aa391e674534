"""`aengine generate`: prompts of a file or a pipe through a model."""
