"""All fact families."""

from __future__ import annotations

from bench.demo_model import families_language, families_nature, families_science, families_world

FAMILIES = (
    *families_world.FAMILIES,
    *families_nature.FAMILIES,
    *families_science.FAMILIES,
    *families_language.FAMILIES,
)
