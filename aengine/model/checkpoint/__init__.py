"""The files of a checkpoint: headers checked first, then tensors read from front to back, straight to their places."""
