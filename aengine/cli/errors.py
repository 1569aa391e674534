"""How a command ends that cannot do what it was asked."""

from __future__ import annotations


class CommandError(Exception):
    """One sentence for standard error, and exit status 1."""


class UsageError(Exception):
    """One sentence about the arguments, and exit status 2."""
