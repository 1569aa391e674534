"""Layers of linear attention, which keep a state, and of full attention by turns."""
