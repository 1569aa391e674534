"""LoRA adapters: reads their files, checks them against the model, and allocates memory for them."""
