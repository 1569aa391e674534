"""The files of a checkpoint. Headers are checked first; then tensors are read in order, straight into their memory."""
