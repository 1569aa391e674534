"""What a process needs around the engine: standard streams that neither raise nor block."""
