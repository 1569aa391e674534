"""Proposers: they draft the next tokens of each row at the end of a step. The next step verifies the drafts."""
