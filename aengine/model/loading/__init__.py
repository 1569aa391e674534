"""Loading a checkpoint: finding its folder, filling a decoder, and reading its other files."""
