"""The command line: `aengine`, or `python -m aengine`."""

from aengine.cli.main import main

__all__ = ["main"]
