"""How the demo model came to be: the corpus it learned, its trainers and its examinations.

`trainer` makes the decoder, `mtp_trainer` adds the layer that drafts tokens, and `tower_trainer` a tower for pictures.

The weights are in `aengine/demo/model/`. The engine reads that folder like any checkpoint.
"""
