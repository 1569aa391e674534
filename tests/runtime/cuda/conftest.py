"""Drafts do not depend on how long steps take, so that tests know how many there are."""

from tests.engine.speculation.conftest import free_drafts

__all__ = ["free_drafts"]
