"""How the demo model came to be: the corpus it learned, its trainer and its examination.

The weights are in `aengine/demo/model/`. The engine reads that folder like any checkpoint.
"""
