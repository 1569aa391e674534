"""Checks and normalizes the arguments of a request. Errors name the argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from aengine.errors import InvalidRequestError
from aengine.requests.sampling_params import PARAMETERS, SamplingParams, unknown_parameter
from aengine.requests.structured import Structured

MAX_INPUTS = 2048  # the most inputs of one request for embeddings or scores
# Arguments of vLLM's LLM and fields of OpenAI's API, with the argument here.
_OTHER_NAMES = {
    "chat_template_kwargs": "template_kwargs",
    "lora_request": "adapter",
    "response_format": "structured",
    "structured_outputs": "structured",
    "use_tqdm": "progress",
}


def resolved_params(
    defaults: SamplingParams, params: SamplingParams | None, sampling: Mapping[str, Any], vocab_size: int
) -> SamplingParams:
    """Return `params`, or the defaults with single fields replaced. Raises `InvalidRequestError`, naming the field."""
    if params is not None and sampling:
        raise InvalidRequestError(f"give either params= or single fields, not both: {', '.join(sampling)}")
    if params is None:
        for name in sampling:
            if name not in PARAMETERS:
                raise unknown_parameter(name, _OTHER_NAMES.get(name))
        params = msgspec.structs.replace(defaults, **sampling)
    elif not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}", "params")
    params = _normalized(params)
    if sampling and "temperature" not in sampling:
        params = params.with_rule_temperature()
    params.validate(vocab_size)
    return params


def token_id_list(prompt: object) -> list[Any]:
    """Return a prompt that is not text as a list. The ids themselves are not checked."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"prompt must be text or token ids, got {type(prompt).__name__}", "prompt")
    return list(prompt)


def one_prompt(prompt: object) -> list[Any]:
    """Return the token ids of a single prompt. Raises `InvalidRequestError` for several prompts."""
    ids = token_id_list(prompt)
    kinds = set(map(type, ids))  # fast for a million ids, because `map` and `set` run in C
    if any(issubclass(kind, (str, list, tuple)) for kind in kinds):
        raise InvalidRequestError(_several("prompt", "generate", "complete"), "prompt")
    return ids


def one_chat(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a chat as new dicts. Raises `InvalidRequestError` for several chats."""
    if isinstance(messages, (list, tuple)) and messages and all(isinstance(item, (list, tuple)) for item in messages):
        raise InvalidRequestError(_several("messages", "chat", "chat"), "messages")
    return dict_list(messages, "messages")


def _several(name: str, all_of_them: str, one_of_them: str) -> str:
    return (
        f"{name}: a request has one, and several were given: await one request for each, "
        f"`await asyncio.gather(*map(engine.{one_of_them}, several))`, or give them to aengine.LLM(...).{all_of_them}"
    )


def prompt_list(prompts: object, bounded: bool = True) -> list[str | list[int]]:
    """Return one prompt or several, each text or token ids, as a list. The ids themselves are not checked.

    bounded: whether there must be 1 to `MAX_INPUTS` prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = token_id_list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    if bounded:
        _check_count(len(items), "prompt")
    return [item if isinstance(item, str) else token_id_list(item) for item in items]


def text_list(texts: object, name: str) -> list[str]:
    """Return one text or several as a list."""
    if isinstance(texts, str):
        return [texts]
    items: list[object] = list(texts) if isinstance(texts, Iterable) else [texts]
    found = [item for item in items if isinstance(item, str)]
    if len(found) != len(items):
        raise InvalidRequestError(f"{name} must be text or a list of texts", name)
    _check_count(len(found), name)
    return found


def _check_count(count: int, name: str) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError(f"{name} must be 1 to {MAX_INPUTS} texts in one request, got {count}", name)


def dict_list(value: object, name: str) -> list[dict[str, Any]]:
    """Return messages or tools as new dicts."""
    if isinstance(value, Iterable):
        items = list(value)
        if all(isinstance(item, Mapping) for item in items):
            return [dict(item) for item in items]
    raise InvalidRequestError(f"{name} must be a list of mappings", name)


@dataclass(frozen=True, slots=True)
class Routing:
    """The options of every request that do not concern sampling."""

    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Routing:
        """Return the options as a `Routing`. Raises `InvalidRequestError` for unknown ones."""
        for name in options:
            if name not in cls.__slots__:
                raise InvalidRequestError(f"unknown parameter {name!r}", name)
        return cls(**options)

    def check(self) -> None:
        """Raise `InvalidRequestError` for values of wrong types."""
        check_routing(self.priority, self.cache_salt, self.adapter)


def check_routing(priority: object, cache_salt: object, adapter: object) -> None:
    """Raise `InvalidRequestError` if `priority` is not a 64-bit integer, or `cache_salt` or `adapter` is not text."""
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
        raise InvalidRequestError(f"priority must be an integer within 64 bits, got {priority!r}", "priority")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError(f"cache_salt must be text, got {type(cache_salt).__name__}", "cache_salt")
    if adapter is not None and not isinstance(adapter, str):
        raise InvalidRequestError(f"adapter must be text, got {type(adapter).__name__}", "adapter")


def _normalized(params: SamplingParams) -> SamplingParams:
    """Return the parameters with each field in its declared type. Callers may pass one stop string, lists, or None."""
    stop: object = params.stop  # `object`: annotations are not enforced at run time
    ids: object = params.stop_token_ids
    words: object = params.bad_words
    bias: object = params.logit_bias
    allowed: object = params.allowed_token_ids
    structured: object = params.structured
    normal: dict[str, Any] = {}
    if not isinstance(stop, tuple):
        normal["stop"] = (stop,) if isinstance(stop, str) else _made(tuple, stop, "stop")
    if not isinstance(ids, tuple):
        normal["stop_token_ids"] = _made(tuple, ids, "stop_token_ids")
    if not isinstance(words, tuple):
        normal["bad_words"] = (words,) if isinstance(words, str) else _made(tuple, words, "bad_words")
    if allowed is not None and not isinstance(allowed, tuple):
        normal["allowed_token_ids"] = _made(tuple, allowed, "allowed_token_ids")
    if not isinstance(bias, dict):
        normal["logit_bias"] = _made(dict, bias, "logit_bias")
    if structured is not None:
        normal["structured"] = _structured(structured)
    return msgspec.structs.replace(params, **normal) if normal else params


def _structured(value: object) -> Structured:
    """Return a `Structured`, also from a mapping with its fields, with its choices as a tuple."""
    if isinstance(value, Mapping):
        try:
            value = Structured(**value)
        except TypeError as error:
            raise InvalidRequestError(f"structured: {error}", "structured") from None
    if not isinstance(value, Structured):
        raise InvalidRequestError(f"structured must be Structured, got {type(value).__name__}", "structured")
    choice: object = value.choice
    return msgspec.structs.replace(value, choice=tuple(choice)) if isinstance(choice, list) else value


def _made(kind: type, value: Any, name: str) -> Any:
    try:
        return kind(() if value is None else value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"{name} cannot be {value!r}", name) from None
