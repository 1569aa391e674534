"""The knob `speculation`: a kind of proposer, with the path of its weights if it has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from aengine.cli.main import main
from aengine.config import EngineConfig, Speculation
from aengine.config.configure import configure
from aengine.config.speculation import chosen_line, read_speculation
from aengine.errors import ConfigError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", Speculation("auto")),
        ("off", Speculation("off")),
        ("mtp", Speculation("mtp")),
        ("NGRAM", Speculation("ngram")),
        ("eagle3=/heads/qwen", Speculation("eagle3", "/heads/qwen")),
        ("eagle3 = owner/head ", Speculation("eagle3", "owner/head")),
        ("dflash=a=b", Speculation("dflash", "a=b")),
        ("draft=Qwen/Qwen3-0.6B", Speculation("draft", "Qwen/Qwen3-0.6B")),
    ],
)
def test_a_kind_and_the_path_of_its_weights(text: str, value: Speculation) -> None:
    assert Speculation.parse(text) == value
    assert Speculation.parse(configure(EngineConfig, {}, speculation=text).speculation) == value


@pytest.mark.parametrize("text", ["eagle3", "eagle3=", "dflash", "draft= "])
def test_a_kind_with_weights_of_its_own_needs_a_path(text: str) -> None:
    kind = text.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^speculation: {kind} needs the folder .*; write {kind}=PATH, got "):
        configure(EngineConfig, {}, speculation=text)


@pytest.mark.parametrize("kind", ["auto", "off", "mtp", "ngram"])
def test_other_kinds_take_no_path(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculation: {kind} takes no path; write {kind} alone, got '{kind}=x'"):
        configure(EngineConfig, {}, speculation=f"{kind}=x")


@pytest.mark.parametrize("text", ["medusa", "/heads/qwen", "=/heads/qwen", '{"method": "ngram"}'])
def test_an_unknown_kind_is_answered_with_the_known_ones(text: str) -> None:
    known = "auto, off, mtp, ngram, eagle3=PATH, dflash=PATH, draft=PATH"
    with pytest.raises(ConfigError) as refused:
        configure(EngineConfig, {"AENGINE_SPECULATION": text})
    assert str(refused.value) == f"speculation: must be one of {known}, got {text!r} (AENGINE_SPECULATION)"


def test_the_default_lets_the_engine_choose() -> None:
    config = configure(EngineConfig, {})
    assert (Speculation.parse(config.speculation).kind, config.draft_tokens) == ("auto", 0)


@pytest.mark.parametrize(("value", "text"), [(True, "auto"), (False, "off"), ("false", "off"), ("none", "off")])
def test_a_switch_means_auto_or_off(value: object, text: str) -> None:
    """YAML reads `speculation: off` as false."""
    assert configure(EngineConfig, {}, speculation=value).speculation == text


@pytest.mark.parametrize(("count", "bound"), [(-1, ">= 0"), (17, "<= 16")])
def test_the_number_of_drafts_is_bounded(count: int, bound: str) -> None:
    with pytest.raises(ConfigError, match=f"^draft_tokens: Expected `int` {bound}, got {count}"):
        configure(EngineConfig, {}, draft_tokens=count)
    assert configure(EngineConfig, {"AENGINE_DRAFT_TOKENS": "16"}).draft_tokens == 16


def test_a_malformed_config_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"^speculation: ngram takes no path; write ngram alone, got 'ngram=x'$"):
        read_speculation(EngineConfig(speculation="ngram=x").speculation)
    assert read_speculation("off") == Speculation("off")


def test_the_command_line_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--speculation", "eagle3"]) == 2
    assert "write eagle3=PATH, got 'eagle3' (--speculation)" in capsys.readouterr().err


def test_a_file_of_flags_may_say_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("speculation: off\ndraft-tokens: 99\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert "draft_tokens: Expected `int` <= 16, got '99'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("speculative_config", "write speculation (mtp, ngram, eagle3=PATH, dflash=PATH, draft=PATH) and draft_tokens"),
        ("speculative_algorithm", "ngram for NGRAM, eagle3=PATH for EAGLE3, dflash=PATH for DFLASH"),
        ("speculative_draft_model_path", "write the path into speculation: eagle3=PATH"),
        ("num_speculative_tokens", "did you mean draft_tokens?"),
        ("speculative_num_steps", "did you mean draft_tokens?"),
        ("speculative_num_draft_tokens", "write draft_tokens, which counts drafts alone: one less"),
        ("speculative_eagle_topk", "drafts are chains, as with 1; leave it out"),
        ("spec_type", "write speculation (mtp, ngram, eagle3=PATH, dflash=PATH"),
        ("model_draft", "draft=PATH"),
        ("draft_max", "did you mean draft_tokens?"),
    ],
)
def test_names_of_other_engines_are_answered_with_the_knob(name: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(EngineConfig, {}, **{name: 1})
    assert advice in str(refused.value)


def test_the_line_of_the_log_says_which_proposer_runs_and_why() -> None:
    line = chosen_line("mtp", "the checkpoint has 1 MTP layer", 3)
    assert line == "speculation: mtp, up to 3 drafts a step for each sequence (the checkpoint has 1 MTP layer)"
    line = chosen_line("off", "the checkpoint has no MTP layers")
    assert line == "speculation: off (the checkpoint has no MTP layers)"
