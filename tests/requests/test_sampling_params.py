"""Sampling parameters: one definition gives the ranges, the help and the flags."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.cli import main
from aengine.engine.requests.arguments import resolved_params
from aengine.errors import InvalidRequestError
from aengine.requests.sampling_params import NAMES, PARAMETERS, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("temperature", 2.1, "between 0 and 2, got 2.1"),
        ("temperature", True, "a finite number, got True"),
        ("temperature", None, "a finite number, got None"),
        ("temperature", float("nan"), "a finite number, got nan"),
        ("top_p", 0, "above 0 and at most 1, got 0"),
        ("top_k", -2, "at least -1, got -2"),
        ("top_k", 1.0, "an integer, got 1.0"),
        ("max_tokens", 0, "at least 1, got 0"),
        ("min_tokens", 3, r"between 0 and max_tokens \(2\), got 3"),
        ("seed", 2**63, "between -9223372036854775808 and 9223372036854775807"),
        ("logprobs", 21, "between 0 and 20, got 21"),
        ("n", "2", "an integer, got '2'"),
        ("min_tokens", -(10**400), "at least 0, got -1000"),  # no float is so large
        ("temperature", 10**400, "between 0 and 2, got 1000"),
    ],
)
def test_a_number_out_of_its_range_is_refused(name: str, value: Any, told: str) -> None:
    fields = {"max_tokens": 2, name: value}
    with pytest.raises(InvalidRequestError, match=f"^{name} must be {told}") as caught:
        SamplingParams(**fields).validate(10)
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop", "speculation"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be true or false, got {value!r}$") as caught:
        SamplingParams(**{name: value}).validate(10)
    assert caught.value.param == name


def test_the_bounds_themselves_are_allowed() -> None:
    SamplingParams(temperature=2, top_p=1, min_p=0, seed=-(2**63), logprobs=20, max_tokens=1, top_k=-1).validate(10)

    class Number(float):
        pass

    SamplingParams(temperature=Number(2)).validate(10)


def test_an_unknown_parameter_gets_a_suggestion_without_internal_names() -> None:
    with pytest.raises(InvalidRequestError, match=r"'temprature' \(did you mean temperature\?\); known are") as caught:
        resolved_params(SamplingParams(), None, {"temprature": 1}, 10)
    assert caught.value.param == "temprature"
    for name, parameter in PARAMETERS.items():
        assert (f" {name}," in f"{caught.value},") is not parameter.is_internal


@pytest.mark.parametrize(("command", "left_out"), [("generate", {"prompt_logprobs"}), ("chat", {"n", "logprobs"})])
def test_every_parameter_is_a_flag_with_its_help(
    command: str, left_out: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help-all"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for name in set(NAMES) - left_out - {"prompt_logprobs", "speculation"}:  # the flag --speculation is a knob
        assert f"--{name.replace('_', '-')} " in told
        assert " ".join(PARAMETERS[name].help.split()) in told
    assert "--unstopped" not in told
