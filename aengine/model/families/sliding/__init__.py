"""Layers with a sliding window, and layers that see everything, by turns."""
