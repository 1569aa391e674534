"""A checkpoint on its way in: where it lies, its weights or random ones in their place, what its other files say."""
