"""Who enters next: the waiting queue, and the one where sequences have adapters."""
