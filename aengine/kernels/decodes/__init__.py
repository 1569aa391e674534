"""The first and the last kernel of a captured step of decodes whose rows may verify drafts."""
