"""Errors that end a command with one sentence and an exit status."""

from __future__ import annotations


class CommandError(Exception):
    """Ends the command with one sentence on standard error, and exit status 1."""


class UsageError(Exception):
    """Ends the command with one sentence about its arguments, and exit status 2."""
