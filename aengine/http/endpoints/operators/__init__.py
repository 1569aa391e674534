"""What operators ask for: health, load, metrics, sleep, adapters, aborting."""
