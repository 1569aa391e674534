"""How the demo model came to be: the corpus it learned, its trainer and its examination.

The weights lie in `aengine/demo/model/`; the engine reads that folder as it reads any checkpoint.
"""
