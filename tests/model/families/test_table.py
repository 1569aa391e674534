"""The README and the checkpoints of tests agree with the table of families."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aengine.model
from aengine.model.families import FAMILIES, WRAPPERS
from tests.model.cases import CASES

README = (Path(aengine.model.__file__).parent / "README.md").read_text()
SECTION = README.partition("## Families")[2].partition("\n## ")[0]
LISTED = {name.strip() for row in re.findall(r"^\| [^|]+ \| (.+) \|$", SECTION, re.M) for name in row.split(",")}


def test_the_readme_lists_every_family() -> None:
    assert {family.title for family in FAMILIES.values()} <= LISTED


# transformers has no classes of these names. Tests of this folder compare them with the classes that compute them.
OTHER_CLASS = {"InternLM3ForCausalLM", "PhiMoEForCausalLM", "MiMoForCausalLM", "BailingMoeV2ForCausalLM"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OTHER_CLASS])
def test_every_family_is_compared_with_transformers(name: str) -> None:
    wrapped = {outer for outer, wrapper in WRAPPERS.items() if name in wrapper.families.values()}
    assert {model.__name__ for model, _, _ in CASES.values()} & {name, *wrapped}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_larger_model_names_families_of_the_table(name: str) -> None:
    assert set(WRAPPERS[name].families.values()) <= set(FAMILIES)
    assert WRAPPERS[name].ignored_prefixes
