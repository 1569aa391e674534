"""What the package index and an installer see: the distribution's name, its licence, its bounds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [
    path
    for place in ("aengine", "bench", "tests", ".ci", "README.md", "pyproject.toml")
    for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    if path.is_file() and path.suffix in ("", ".md", ".py", ".toml", ".html", ".js", ".sh")
]
# `aengine` on the index is another project: `pip install 'aengine[x]'` would install it instead of this package.
STRANGER = re.compile(r"aengine\[[a-z]|pip install [^\n.`&]*\baengine(?!-llm)")


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == "aengine-llm"
    assert PROJECT["scripts"] == {"aengine": "aengine.cli:main"}


def test_no_text_says_to_install_the_package_of_somebody_else() -> None:
    found = [f"{path.relative_to(ROOT)}: {hit[0]}" for path in FILES for hit in STRANGER.finditer(path.read_text())]
    assert not [line for line in found if not line.startswith("tests/test_packaging.py")]  # its own examples


@pytest.mark.parametrize("text", ["pip install 'aengine[ray]'", "pip install -U aengine", "the extra aengine[cuda]"])
def test_texts_that_would_are_found(text: str) -> None:
    assert STRANGER.search(text)


def test_every_extra_that_a_text_names_exists() -> None:
    named = {name for path in FILES for name in re.findall(r"pip install '\.\[([a-z-]+)\]'", path.read_text())}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert {"ray", "kv-events", "cuda", "test"} <= named


def test_the_licence_stands_in_the_repository_and_in_the_package() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_libraries_whose_inner_parts_or_texts_are_used_have_an_upper_bound() -> None:
    bounds = {re.match(r"[a-z0-9-]+", line)[0]: line for line in PROJECT["dependencies"]}  # type: ignore[index]
    for name in ("torch", "hypercorn", "msgspec", "llguidance"):
        assert re.search(r",<\d", bounds[name]), name
