"""The sampling fields of requests, and their conversion to `SamplingParams`.

`null` means that the field is missing. The engine checks the ranges; here they are only for the OpenAPI document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from aengine.http.fields.structured import ResponseFormat, StructuredOutputs, single_form
from aengine.http.fields.unknown import REFUSED_WITH_PROMPTS, RequestBody, Unsupported
from aengine.requests.sampling_params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    PARAMETERS,
    SamplingParams,
)
from aengine.requests.structured import Structured


def _range(**schema: int | float) -> Meta:
    """Return a range for the schema only. The engine's error for other values is clearer than the parser's."""
    return Meta(extra_json_schema=schema)


def _range_of(name: str) -> Meta:
    """Return the range of a sampling parameter, for the schema only."""
    parameter = PARAMETERS[name]
    bounds = {"minimum": parameter.low, "exclusiveMinimum": parameter.above, "maximum": parameter.high}
    return _range(**{keyword: bound for keyword, bound in bounds.items() if math.isfinite(bound)})


Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(le=2**63 - 1, extra_json_schema={"minimum": 0})]
TokenId = Count
LastTokens = Annotated[int, Meta(ge=1, le=2**63 - 1)]  # how many of the prompt's last tokens are kept
Logprobs = Annotated[int, _range_of("logprobs")]
StopString = Annotated[str, _range(minLength=1, maxLength=MAX_STOP_LENGTH)]
UnstoppedEnd = Annotated[str, _range(maxLength=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], _range(maxItems=MAX_STOP_STRINGS)]
Temperature = Annotated[float, _range_of("temperature")]
TopK = Annotated[int, Meta(le=2**63 - 1, extra_json_schema={"minimum": -1})]
Probability = Annotated[float, _range_of("top_p")]
BadWord = Annotated[str, _range(minLength=1, maxLength=MAX_BAD_WORD_LENGTH)]
Bias = Annotated[float, _range(minimum=-100, maximum=100)]


class SamplingRequest(RequestBody, kw_only=True):
    """The base of requests that generate text: the fields that all of them have, with the same name and meaning."""

    refused: ClassVar[Mapping[str, Unsupported]] = REFUSED_WITH_PROMPTS
    refuses_other_fields: ClassVar[bool] = True

    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, _range_of("min_p")] | None = None
    repetition_penalty: Annotated[float, _range_of("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _range_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _range_of("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[Int, Bias], _range(maxProperties=MAX_LOGIT_BIAS)] | None = None
    seed: Int | None = None
    stop: StopString | StopStrings | None = None
    stop_in_thought: bool | None = None
    unstopped: Annotated[list[UnstoppedEnd], _range(minItems=2, maxItems=3)] | None = None
    stop_token_ids: Annotated[list[TokenId], _range(maxItems=MAX_LOGIT_BIAS)] | None = None
    bad_words: Annotated[list[BadWord], _range(maxItems=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], _range(minItems=1)] | None = None
    include_stop: bool | None = None
    include_stop_str_in_output: bool | None = None  # another name of include_stop
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    shown_special_ids: Annotated[list[TokenId], _range(maxItems=MAX_LOGIT_BIAS)] | None = None
    speculation: bool | None = None  # false: no token is drafted ahead for this request
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None  # accepted without effect

    def params(
        self,
        defaults: SamplingParams,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structured: Structured | None = None,
    ) -> SamplingParams:
        """Return the request's sampling parameters, with `defaults` for missing fields.

        max_tokens: the endpoint's default.
        logprobs, structured: the values that the endpoint has read from its own fields.
        """
        fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name, None)
            if value is not None:
                fields[name] = tuple(value) if isinstance(value, list) else value
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        if self.include_stop_str_in_output:
            fields["include_stop"] = True
        forms = {}
        for name in _FORM_FIELDS:
            if (form := getattr(self, name, None)) is not None:
                forms[name] = form
        if forms:
            structured = single_form(forms)
        if structured is not None:
            fields["structured"] = structured
        params = msgspec.structs.replace(defaults, **fields)
        return params.with_rule_temperature() if self.temperature is None else params


class MultiChoiceRequest(SamplingRequest, kw_only=True):
    """The base of requests that may ask for several choices: completions, chats and `/generate`."""

    max_tokens: Count | None = None  # 0 is allowed with echo only
    prompt_logprobs: Logprobs | None = None
    n: Annotated[int, _range_of("n")] | None = None
    # The form of the output.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


_SAMPLING_FIELDS = [name for name in SamplingParams.__struct_fields__ if name in MultiChoiceRequest.__struct_fields__]
_FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
