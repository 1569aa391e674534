"""Loads a checkpoint: finds its folder, fills a decoder, and reads its other files."""
