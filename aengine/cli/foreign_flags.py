"""Flags of vLLM's that mean the same here: taken, and left out of the help."""

from __future__ import annotations

import argparse
import sys

from aengine.config import EngineConfig

SAME_KNOB = {"api_key": "api_keys", "enable_prefix_caching": "prefix_cache", "enable_sleep_mode": "sleep_mode"}
# What they ask for is so in any case.
ALWAYS = {
    "disable_log_requests",
    "disable_log_stats",
    "enable_auto_tool_choice",
    "enable_chunked_prefill",
    "enable_lora",
    "enable_prompt_tokens_details",
    "enable_server_load_tracking",
    "no_enable_log_requests",
    "trust_remote_code",
}
_SHORT = {"-tp": "tensor_parallel_size", "-q": "quantization"}


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of `aengine serve`."""

    def add(option: str, dest: str, **how: object) -> None:
        parser.add_argument(option, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)  # type: ignore[arg-type]

    for option, knob in _SHORT.items():
        add(option, knob)
    for name, knob in SAME_KNOB.items():
        if knob == "api_keys":
            add(_flag(name), knob, type=lambda key: (key,))  # one key, commas and all
        else:
            add(_flag(name), knob, action=argparse.BooleanOptionalAction)
    for name in ALWAYS:
        add(_flag(name), name, action="store_true")


def explain(asked: set[str], config: EngineConfig) -> None:
    """Say on standard error what a flag of another engine's does not do here."""
    if "trust_remote_code" in asked:
        _say("trust-remote-code: no code of a checkpoint is ever run here; known families load without")
    if "enable_lora" in asked and not config.lora and not config.lora_loading:
        _say("enable-lora: no adapter is named; --lora NAME=FOLDER names one")


def asked_always(args: argparse.Namespace) -> set[str]:
    """Which flags of those that change nothing were given."""
    return {name for name in ALWAYS if hasattr(args, name)}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _say(text: str) -> None:
    print(f"aengine: {text}", file=sys.stderr, flush=True)
