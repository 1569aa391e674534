"""The device's side of the running batch: its state, the launch of steps, their completion, memory sizing."""
