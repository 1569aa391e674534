"""The embedded demo model: its files in `model/`, the corpus it learned, its trainer and its examination.

Nothing here is imported by the engine; it reads the folder `model/` as it reads any checkpoint.
"""
