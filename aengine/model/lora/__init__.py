"""LoRA adapters: their files, checked against the model, and the memory that a model has for them."""
