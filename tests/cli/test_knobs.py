"""Flags are derived from the definition of the knobs."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from aengine.cli.errors import UsageError
from aengine.cli.knobs import add_knobs, add_model, list_knobs, read_knobs
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.config.configure import configure
from tests.cli.knob_table import PLACE, README, knob_table

KINDS = (EngineConfig, ServerConfig, ListenConfig)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_model(made)
    for kind in KINDS:
        add_knobs(made, kind, kind.__name__)
    return made


def test_every_knob_is_a_flag_with_its_help_its_default_and_its_variable() -> None:
    told = " ".join(parser().format_help().split())
    for kind in KINDS:
        for field in msgspec.structs.fields(kind):
            assert f"--{field.name.replace('_', '-')}" in told
            assert f"AENGINE_{field.name.upper()})" in told
    assert "most sequences running at once (device rows) (default: 256; AENGINE_MAX_NUM_SEQS)" in told
    assert "--dtype auto|bfloat16|float16|float32" in told
    assert "(default: on; AENGINE_PREFIX_CACHE)" in told


def test_every_flag_sets_its_knob() -> None:
    pairs = {"a": "x", "b": "y/z"}
    values = {
        "A=X,B=Y": "a=x, b=y/z",
        "TEXT": "cpu",
        "N": "1024",
        "X": "0.5",
        "A,B": "https://a.example, https://b.example",
        "": "",
    }
    special = {"grammar_nesting": "64", "max_loras": "64", "max_lora_rank": "64"}
    special |= {"speculation": "ngram", "draft_tokens": "4"}
    for kind in KINDS:
        for knob in list_knobs(kind):
            flag = f"--{knob.name.replace('_', '-')}"
            value = knob.choices[-1] if knob.choices else values[knob.kind]
            given = [flag, value] if knob.kind else [f"--no-{knob.name.replace('_', '-')}"]
            if knob.name in special:
                given[1] = special[knob.name]
            set_to = getattr(read_knobs(parser().parse_args(given), kind), knob.name)
            lists = {"A,B": ("https://a.example", "https://b.example"), "A=X,B=Y": pairs}
            expected = lists.get(knob.kind, given[-1])
            assert str(set_to) == ("False" if not knob.kind else str(expected)), knob.name


def test_pairs_may_be_given_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENGINE_LORA", "c=z")
    config = read_knobs(parser().parse_args(["--lora", "a=x", "--lora", "b=y"]), EngineConfig)
    assert config.lora == {"a": "x", "b": "y"}


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENGINE_PORT", "1")
    monkeypatch.setenv("AENGINE_BACKLOG", "2")
    config = read_knobs(parser().parse_args(["--port", "3"]), ListenConfig)
    assert (config.port, config.backlog) == (3, 2)


def test_the_model_is_positional_or_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENGINE_MODEL", "from/environment")
    for given, model in ((["a/b"], "a/b"), (["--model", "a/b"], "a/b"), ([], "from/environment")):
        assert read_knobs(parser().parse_args(given), EngineConfig).model == model


def test_without_flags_the_environment_decides() -> None:
    args = parser().parse_args([])
    for kind in KINDS:
        assert read_knobs(args, kind) == configure(kind)


def test_a_bad_value_names_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^page_size: Expected `int`, got 'many' \(--page-size\)$"):
        read_knobs(parser().parse_args(["--page-size", "many"]), EngineConfig)


def test_the_readme_has_a_table_of_all_knobs() -> None:
    written = PLACE.search(README.read_text())
    assert written is not None
    assert written[0] == knob_table(), "python -m tests.cli.knob_table rewrites it"
