"""Towers, which compute embeddings from images. Begin with `base.py`; `build.py` chooses the family's tower."""
